"""Every family on 2 and 4 CPU devices against the golden logits, which one device gives, too."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_moe_jax import ConfigError, Engine, SamplingParams
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.parallel.mesh import mesh_of
from lora_moe_jax.parallel.sharding import sharding_rules
from lora_moe_jax.serving.steps import GRAPHS_WITH_SUMS
from tests.serving.helpers import bits, greedy, prompts, sampled

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = dict(
    dtype="float32", max_adapters=3, max_rank=8, max_length=32, max_requests=4, token_buckets=(80,)
)
MESHES = {
    "tensor2": {"tensor": 2},
    "expert2": {"expert": 2},
    "tensor4": {"tensor": 4},
    "expert4": {"expert": 4},
    "expert2-tensor2": {"expert": 2, "tensor": 2},
}
# CI samples both kinds of attention, and biases, with experts, on the mesh of both axes; the rest
# is slow.
QUICK = {(family, "expert2-tensor2") for family in ("deepseek_v3", "gpt_oss")}


def make_mesh(axes: dict[str, int]) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)


@functools.lru_cache(2)
def engine_on(family: str, mesh: str) -> Engine:
    return Engine.from_pretrained(GOLDEN / family / "base", mesh=make_mesh(MESHES[mesh]), **SIZES)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param(family, mesh, marks=() if (family, mesh) in QUICK else pytest.mark.slow)
        for family in ("qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
        for mesh in MESHES
    ],
)
def test_the_golden_logits(family, mesh):
    """Of the mixed batch; and generating gives the logprobs that scoring gives."""
    engine, folder = engine_on(family, mesh), GOLDEN / family
    golden = load_file(folder / "golden.safetensors")
    names = list(json.loads((folder / "golden.json").read_text())["adapters"])
    for name in names:
        engine.load_adapter(name, folder / "adapters" / name)
    prompts = golden["input_ids"].tolist()
    adapters = [None if i < 0 else names[i] for i in golden["mixed.adapter_index"]]
    scores = engine.score(prompts, adapters, return_logits=True)
    logits = np.stack([score.logits for score in scores])
    # One device is off by 9e-6 at most; sums over devices round in another order.
    assert np.abs(logits - golden["mixed.logits"]).max() <= 2e-5
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2)
    output = engine.generate([prompts[1][:5]], params, [adapters[1]])[0]
    sequence = output.prompt_token_ids + output.token_ids
    rescored = engine.score([sequence], [adapters[1]], top_logprobs=2)[0]
    assert rescored.top_logprobs[4:] == output.top_logprobs
    np.testing.assert_array_equal(rescored.logprobs[4:], np.float32(output.logprobs))


def test_requests_have_the_bits_that_they_have_alone():
    """On four devices, whose shares are summed up."""
    engine, folder = engine_on("qwen3_moe", "expert2-tensor2"), GOLDEN / "qwen3_moe" / "adapters"
    for name in ("attn", "experts"):
        engine.load_adapter(name, folder / name)
    texts, names = prompts([3, 9, 1, 14]), ["experts", None, "attn", "experts"]
    params = [greedy(5), sampled(1, 9), sampled(2, 4), greedy(7)]
    together = engine.generate(texts, params, names)
    for text, its, name, out in zip(texts, params, names, together, strict=True):
        assert bits(engine.generate([text], its, name)[0]) == bits(out)


def test_xla_knows_the_options_of_steps_on_gpus():
    """It refuses a name that it does not know, on a CPU too."""
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(GRAPHS_WITH_SUMS)
    ((option, names),) = GRAPHS_WITH_SUMS.items()
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid enum value"):
        lowered.compile({option: f"{names},NOTHING"})


def test_weights_and_cache_are_split():
    engine = engine_on("qwen3_moe", "expert2-tensor2")
    experts = engine.bank.arrays["model.layers.0.mlp.experts.gate_proj"]
    assert experts.a.sharding.shard_shape(experts.a.shape)[1] == experts.a.shape[1] // 2
    assert experts.b.sharding.shard_shape(experts.b.shape)[3] == experts.b.shape[3] // 2
    keys, _ = engine._runner.steps.pages
    assert keys.sharding.shard_shape(keys.shape)[2] == keys.shape[2] // 2


@pytest.mark.parametrize(
    ("family", "axes", "names"),
    [
        ("qwen3_moe", {"expert": 3}, ("number of experts", "expert", "8", "3")),
        ("qwen3", {"tensor": 3}, ("num_attention_heads", "tensor", "4", "3")),
        ("qwen3", {"data": 2}, ("unknown mesh axis", "data", "tensor")),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(family, axes, names):
    with pytest.raises(ConfigError) as refusal:
        Engine.from_pretrained(GOLDEN / family / "base", mesh=make_mesh(axes), **SIZES)
    for name in names:
        assert name in str(refusal.value)


def test_a_mesh_by_its_sizes():
    sizes = {"expert": 2, "tensor": 1}
    assert mesh_of(sizes) == mesh_of(make_mesh(sizes))
    assert mesh_of(None) is None
    with pytest.raises(ConfigError, match="unknown mesh axis.*\n.*'tenosr'"):
        mesh_of({"tenosr": 1})


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"tensor": 0},
        {"tensor": "2"},
        {"tensor": True},
        {2: "tensor"},
        ("tensor", 2),
        2,
        jax.sharding.AbstractMesh((2,), ("tensor",)),
    ],
)
def test_what_is_no_mesh_of_devices(mesh):
    with pytest.raises(ConfigError, match="no mesh of devices") as refusal:
        Engine.from_pretrained(GOLDEN / "qwen3" / "base", mesh=mesh, **SIZES)
    assert refusal.value.key == "mesh" and type(mesh).__name__ in refusal.value.found


def test_a_width_that_no_layer_has_need_not_be_divided(tmp_path):
    values = json.loads((GOLDEN / "qwen3_moe/base/config.json").read_text())
    values |= {"intermediate_size": 41, "mlp_only_layers": [], "decoder_sparse_step": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    sharding_rules(read_config(tmp_path), make_mesh({"tensor": 2}))
    (tmp_path / "config.json").write_text(json.dumps(values | {"mlp_only_layers": [0]}))
    with pytest.raises(ConfigError, match="intermediate_size"):
        sharding_rules(read_config(tmp_path), make_mesh({"tensor": 2}))


def test_key_value_heads_are_replicated_when_there_are_too_few():
    config = read_config(GOLDEN / "qwen3/base")  # 4 query heads, 2 key/value heads
    assert sharding_rules(config, make_mesh({"tensor": 2}))["kv_heads"] == "tensor"
    assert sharding_rules(config, make_mesh({"tensor": 4}))["kv_heads"] is None
