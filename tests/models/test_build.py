"""Loading and saving whole models."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import (
    abstract_model,
    build_model,
    load_model,
    projections,
    save_model,
)
from tests.adapters.tables import table

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden"
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")


def load(folder: Path, dtype: str = "float32"):
    config = read_config(folder)
    return load_model(Checkpoint.open(folder, config), config, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_are_lossless(family, tmp_path):
    source, copy = GOLDEN / family / "base", tmp_path / "copy"
    model = load(source)
    save_model(copy, model)
    config = read_config(copy)
    assert config == read_config(source)
    before, after = Checkpoint.open(source, config), Checkpoint.open(copy, config)
    assert dict(before.names()) == dict(after.names())
    for name in before.names():
        np.testing.assert_array_equal(before.read(name), after.read(name), err_msg=name)
    for old, new in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(load(copy))), strict=True
    ):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_projection_of_the_family_has_slots(family):
    model = abstract_model(read_config(GOLDEN / family / "base"), adapters=SlotConfig(2, 4))
    assert projections(model) == dict(table(family))


def test_correction_bias_stays_float32():
    model = load(GOLDEN / "deepseek_v3/base", dtype="bfloat16")
    router = model.layers[1].mlp.gate
    assert router.correction_bias[...].dtype == np.float32
    assert router.proj.weight[...].dtype == "bfloat16"


def test_random_models_differ_by_seed():
    config = read_config(GOLDEN / "qwen3/base")
    first, second = (build_model(config, dtype="float32", seed=seed) for seed in (0, 1))
    assert not np.array_equal(first.embed_tokens.weight[...], second.embed_tokens.weight[...])


@pytest.mark.slow
def test_loading_needs_little_host_memory(tmp_path):
    """Host buffers beyond the mapped file: at most twice the largest stacked expert group.

    In a process of its own: with several CPU devices JAX lets go of host buffers late.
    """
    small = read_config(GOLDEN / "qwen3_moe/base")
    moe = dataclasses.replace(small.moe, expert_size=512)
    config = dataclasses.replace(small, hidden_size=512, moe=moe)
    save_model(tmp_path / "model", build_model(config, dtype="float32"))
    largest = 4 * 8 * 2 * 512 * 512  # gate and up of all experts, 16.8 MB; the model has 78 MB
    command = [sys.executable, "-c", MEASURE_LOADING, str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert largest <= int(run.stdout) <= 2 * largest


MEASURE_LOADING = """
import sys, tracemalloc
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.models.build import load_model
config = read_config(sys.argv[1])
checkpoint = Checkpoint.open(sys.argv[1], config)
tracemalloc.start()
model = load_model(checkpoint, config, dtype="float32")
print(tracemalloc.get_traced_memory()[1])
"""
