"""The fields of `LoraConfig` by themselves: types and ranges."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_jax import AdapterError, LoraConfig


@pytest.mark.parametrize(
    "field, value",
    [
        ("rank", 4.0),
        ("rank", True),
        ("alpha", "8"),
        ("alpha", float("nan")),
        ("target_modules", None),
        ("target_modules", ""),
        ("target_modules", ["q_proj", 3]),
        ("exclude_modules", {"q_proj": 1}),
        ("exclude_modules", ["q_proj", ""]),
        ("rank_pattern", {3: 2}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {None: 2}),
        ("use_rslora", "no"),
        ("use_rslora", 1),
        ("use_rslora", None),
        ("init", ["default"]),
        ("init", np.ones(2)),
        ("seed", "0"),
    ],
)
def test_types(field, value):
    with pytest.raises(AdapterError, match="a field of LoraConfig is wrong") as error:
        LoraConfig(**{field: value}).peft()
    assert error.value.key == field and repr(value) in error.value.found


def test_numbers_in_patterns():
    for fields, key in (
        ({"rank_pattern": {"q_proj": 2.0}}, "rank_pattern['q_proj']"),
        ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern['q_proj']"),
    ):
        with pytest.raises(AdapterError) as error:
            LoraConfig(**fields).peft()
        assert error.value.key == key


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_rslora(value):
    assert LoraConfig(use_rslora=value).peft().use_rslora is bool(value)
