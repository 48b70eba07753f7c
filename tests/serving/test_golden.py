"""The engine computes what transformers and PEFT compute."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from lora_moe_jax import Engine
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.models.build import load_model
from tests.adapters.tables import FAMILIES, GOLDEN, golden_adapters
from tests.serving.conftest import OPTIONS
from tests.serving.helpers import load_golden

TOLERANCE = 1e-4
# DeepSeek-V2 alone compiles a step that others do not need; DeepSeek-V3 has its attention, too.
CASES = [
    pytest.param(family, adapter, marks=pytest.mark.slow if family == "deepseek_v2" else ())
    for family in FAMILIES
    for adapter in (None, *golden_adapters(family))
]
# Of these families other quick tests need whole engines. The rest compiles one step.
SHARED = ("qwen3_moe", "deepseek_v3", "gpt_oss")
ONE_STEP = {"token_buckets": (96,), "max_logprobs": 0}
MOE_FAMILIES = [family for family in FAMILIES if (GOLDEN / family / "base_fused").exists()]


@pytest.fixture
def engine_of(engine):
    return lambda family: engine(family) if family in SHARED else engine(family, **ONE_STEP)


def difference(scores, expected: np.ndarray) -> float:
    found = np.stack([score.logits for score in scores])
    assert found.shape == expected.shape and found.dtype == np.float32
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize(("family", "adapter"), CASES)
def test_logits(family, adapter, engine_of, golden):
    one, reference = engine_of(family), golden(family)
    if adapter is not None:
        load_golden(one, family, [adapter])
    ids = reference.input_ids.tolist()
    scores = one.score(ids, [adapter] * len(ids), return_logits=True)
    assert difference(scores, reference.logits[adapter or "base"]) <= TOLERANCE
    for score, sequence in zip(scores, ids, strict=True):
        wide = score.logits.astype(np.float64)
        logprobs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
        expected = logprobs[np.arange(len(sequence) - 1), sequence[1:]]
        np.testing.assert_allclose(score.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_that_mixes_adapters(family, engine_of, golden):
    one, reference = engine_of(family), golden(family)
    load_golden(one, family)
    assert len(set(reference.mixed_adapters)) == 4
    scores = one.score(reference.input_ids.tolist(), reference.mixed_adapters, return_logits=True)
    assert difference(scores, reference.mixed_logits) <= TOLERANCE
    assert [score.adapter for score in scores] == reference.mixed_adapters


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_of_both_spellings_are_equal(family):
    config = read_config(GOLDEN / family / "base")
    assert read_config(GOLDEN / family / "base" / "config_v4.json") == config
    if family in MOE_FAMILIES:
        assert read_config(GOLDEN / family / "base_fused") == config


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_parameters_of_both_layouts_are_equal(family):
    states = []
    for layout in ("base", "base_fused"):
        folder = GOLDEN / family / layout
        config = read_config(folder)
        model = load_model(Checkpoint.open(folder, config), config, dtype="float32")
        states.append(dict(nnx.to_flat_state(nnx.state(model))))
    hub, fused = states
    assert hub.keys() == fused.keys() and hub
    for path, variable in hub.items():
        arrays = [np.asarray(jax.device_get(v[...])) for v in (variable, fused[path])]
        assert arrays[0].any(), path
        assert arrays[0].tobytes() == arrays[1].tobytes(), path


@pytest.mark.slow
def test_an_engine_of_the_fused_layout_and_the_old_config(golden, tmp_path):
    family = "deepseek_v2"
    shutil.copytree(GOLDEN / family / "base_fused", tmp_path / "base")
    shutil.copy(GOLDEN / family / "base" / "config_v4.json", tmp_path / "base" / "config.json")
    one, reference = Engine.from_pretrained(tmp_path / "base", **OPTIONS), golden(family)
    scores = one.score(reference.input_ids.tolist(), return_logits=True)
    assert difference(scores, reference.logits["base"]) <= TOLERANCE
