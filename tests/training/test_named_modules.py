"""Names and patterns of a configuration that mean nothing are refused, with what there is."""

from __future__ import annotations

import pytest

from lora_moe_jax import AdapterError, LoraConfig
from lora_moe_jax.training.named_modules import check_named
from tests.adapters.tables import table

MODEL = table("qwen3_moe")
ATTENTION = {name: its for name, its in MODEL.items() if ".self_attn." in name}
LAYER = "model.layers.0"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_modules": ["q_proj", "experts.w1", f"{LAYER}.mlp.experts.3.up_proj", "lm_head"]},
        {"target_modules": r".*\.(q|k)_proj", "exclude_modules": r"model\.layers\.0\..*"},
        {"exclude_modules": ["experts.up_proj", f"{LAYER}.self_attn.o_proj", "gate"]},
        {"rank_pattern": {"q_proj": 8, r"experts\.3\.up_proj": 2, r"layers\.1\..*_proj": 4}},
        {"alpha_pattern": {"embed_tokens": 8, r"experts\.\d+\.(up|gate)_proj": 2}},
    ],
)
def test_what_there_is(fields):
    check_named(LoraConfig(**fields).peft(), MODEL, MODEL)


@pytest.mark.parametrize(
    "fields, key, found",
    [
        ({"target_modules": "all_linear"}, "target_modules", "all_linear"),
        ({"target_modules": "q_proj"}, "target_modules", "q_proj"),  # the whole name
        ({"target_modules": ["q_proj", "nope"]}, "target_modules", "nope"),
        ({"target_modules": []}, "target_modules", "()"),
        ({"exclude_modules": ["o_proj", "opproj"]}, "exclude_modules", "opproj"),
        ({"exclude_modules": "o_proj"}, "exclude_modules", "o_proj"),
        ({"rank_pattern": {"o_proj": 2, "q_prooj": 8}}, "rank_pattern", "q_prooj"),
        ({"rank_pattern": {r"experts\.up_proj": 8}}, "rank_pattern", "experts"),
        ({"alpha_pattern": {"q_prooj": 8}}, "alpha_pattern", "q_prooj"),
    ],
)
def test_what_is_no_module_of_the_model(fields, key, found):
    with pytest.raises(AdapterError, match="the model has no module") as error:
        check_named(LoraConfig(**fields).peft(), MODEL, ATTENTION | {"lm_head": MODEL["lm_head"]})
    assert error.value.key == key and found in error.value.found
    assert "'k_proj'" in error.value.expected and "'up_proj'" in error.value.expected
    assert ("all-linear" in error.value.hint) == (key == "target_modules")


@pytest.mark.parametrize("target", [["q_proj", "up_proj"], r".*\.experts\..*", ["lm_head"]])
def test_what_the_engine_has_no_slots_for(target):
    config = LoraConfig(target_modules=target, exclude_modules=["down_proj"]).peft()
    with pytest.raises(AdapterError, match="the engine has no slots") as error:
        check_named(config, MODEL, ATTENTION)
    assert error.value.expected == "names among ['k_proj', 'o_proj', 'q_proj', 'v_proj']"
    assert "build the engine with target_modules" in error.value.hint


def test_all_linear_layers_of_an_engine_that_has_slots_for_none():
    with pytest.raises(AdapterError, match="the engine has no slots"):
        check_named(LoraConfig().peft(), MODEL, {"lm_head": MODEL["lm_head"]})
