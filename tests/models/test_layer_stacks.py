"""Models whose layers' weights lie in stacks: what lies where, and one loop for all."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import Mesh

from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.models import build, layer_loop
from lora_moe_jax.models.build import abstract_model, load_model, projections, random_model
from lora_moe_jax.models.layer_loop import loops
from lora_moe_jax.models.layer_stacks import layer_runs, place
from lora_moe_jax.serving.model_arrays import ModelArrays
from lora_moe_jax.serving.steps import page_shapes
from pallas_kernels import PageView
from pallas_kernels.layered import is_layered
from tests.models.test_build import FAMILIES, GOLDEN
from tests.pallas_kernels.tpu_interpreter import interpreter

TOKENS = jnp.array([3, 1, 4, 1, 5])


@pytest.fixture
def stacked(monkeypatch):
    monkeypatch.setattr(build, "stacks_layers", lambda dtype: True)


@pytest.fixture
def looped(monkeypatch):
    """Small models have loops too."""
    monkeypatch.setattr(layer_loop, "WRITTEN_OUT", 1)


def load(family: str, slots: SlotConfig | None = None, mesh: Mesh | None = None):
    folder = GOLDEN / family / "base"
    config = read_config(folder)
    checkpoint = Checkpoint.open(folder, config)
    return load_model(checkpoint, config, dtype="float32", adapters=slots, mesh=mesh)


def hidden(model):
    """Of a short sequence, with a page of its cache written by each layer, and its experts."""
    config, tokens = model.config, TOKENS.shape[0]
    shapes = page_shapes(model, config, None, pages=2, page_size=8, dtype="float32")
    pages = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
    view = PageView(jnp.zeros(tokens, jnp.int32), jnp.arange(tokens), jnp.array([[1]]))
    slots = jnp.full(tokens, -1)
    found, cache, choices = model(TOKENS, slots, LayerCache(*pages, view), routed=True)
    return found, cache.first, cache.second, choices


def of(model):
    """That of a model; as arguments of a function the parts of a stack would be arrays of their
    own. A new one, which nobody has traced yet."""
    return functools.partial(hidden, model)


def count_loops(function) -> int:
    """Of layers: others are inside of functions that these call."""
    eqns = jax.make_jaxpr(function)().jaxpr.eqns
    return sum(eqn.primitive.name == "while" for eqn in eqns)


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES),
    ],
)
def test_a_loop_computes_what_layers_written_out_do(family, request):
    """The same bits, but for what XLA for CPUs compiles otherwise in a loop of several turns."""
    apart = load(family)
    request.getfixturevalue("stacked")
    together = load(family)
    runs = layer_runs(apart)
    assert loops(together.layers) == runs and loops(apart.layers) == [
        range(i, i + 1) for run in runs for i in run
    ]
    # No two layers of the small Qwen3-MoE that follow each other are alike.
    assert (max(map(len, runs)) > 1) == (family != "qwen3_moe")
    found, wanted = (jax.tree.leaves(jax.jit(of(model))()) for model in (together, apart))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    request.getfixturevalue("looped")
    for one, other in zip(jax.tree.leaves(jax.jit(of(together))()), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert count_loops(of(together)) == sum(len(run) > 1 for run in runs)
    assert count_loops(of(apart)) == 0
    for one, other in zip(
        jax.tree.leaves(nnx.state(together), is_leaf=is_layered),
        jax.tree.leaves(nnx.state(apart)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("layers, tokens, expected", [(48, 1, 24), (25, 8, 13), (48, 9, 4)])
def test_on_a_gpu_layers_of_few_tokens_have_two_turns(layers, tokens, expected, monkeypatch):
    assert layer_loop._written_out(layers, tokens) == 4
    monkeypatch.setattr(layer_loop, "platform_implementation", lambda: "mosaic_gpu")
    assert layer_loop._written_out(layers, tokens) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "windows, loop_count",
    [((2, None) * 5, 1), ((None, 2, 3) * 3, 1), ((None, None, 2, 2, 2), 0)],
)
def test_a_loop_of_layers_of_several_windows(windows, loop_count, looped, request):
    """Those that take turns, and those that do not."""
    config = read_config(GOLDEN / "qwen3/base")
    config = dataclasses.replace(config, num_layers=len(windows), windows=windows)
    apart = random_model(config, dtype="float32")
    full = random_model(dataclasses.replace(config, windows=()), dtype="float32")
    request.getfixturevalue("stacked")
    together = random_model(config, dtype="float32")
    assert loops(together.layers) == [range(len(windows))]
    functions = [of(model) for model in (together, apart, full)]
    assert [count_loops(function) for function in functions] == [loop_count, 0, 0]
    found, wanted, other = (jax.tree.leaves(jax.jit(function)()) for function in functions)
    for one, its in zip(found, wanted, strict=True):
        # XLA for CPUs compiles what is inside a loop of two turns otherwise than what is outside.
        np.testing.assert_allclose(one, its, atol=1e-5)
    assert np.abs(found[0] - other[0]).max() > 1e-2


FOUR = pytest.mark.skipif(jax.device_count() < 4, reason="a mesh of four")


@pytest.mark.parametrize(
    "mesh", [None, pytest.param((2, 2), marks=FOUR)], ids=["one device", "four"]
)
def test_on_a_tpu_the_last_axis_is_innermost(mesh, monkeypatch):
    """Where it is no whole lanes on a device, if that is not XLA's way anyway."""
    mesh = mesh and jax.make_mesh(mesh, ("expert", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    here = jnp.zeros(()).sharding
    split = mesh and jax.NamedSharding(mesh, jax.P(None, None, "tensor"))
    assert place((3, 4, 6), split) is split
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    found = place((3, 4, 6), split)
    assert found.layout.major_to_minor == (0, 1, 2) and found.sharding == (split or here)
    assert isinstance(place((3, 4, 128), split), Format) == (mesh is not None)
    assert place((3,), None) is None
    model = load("deepseek_v3", mesh=mesh)
    monkeypatch.undo()
    plain = load("deepseek_v3", mesh=mesh)
    leaves = jax.tree.leaves(nnx.state(model), is_leaf=is_layered)
    assert any(map(is_layered, leaves))
    for one, other in zip(leaves, jax.tree.leaves(nnx.state(plain)), strict=True):
        np.testing.assert_array_equal(one, other)
        if is_layered(one):
            assert one.stack.sharding.is_equivalent_to(*_stacked(other)), one.stack.sharding


def _stacked(array):
    """The sharding of a stack of such arrays, and its axes."""
    sharding, axes = array.sharding, array.ndim + 1
    if isinstance(sharding, jax.NamedSharding):
        sharding = jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec))
    return sharding, axes


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_loop_on_a_tpu(family, monkeypatch):
    """With the kernels that a TPU has by default, in the interpreter: the bits of layers written
    out, and values of plain JAX."""
    plain = load(family)
    wanted = jax.jit(functools.partial(hidden, plain))()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    together = load(family)
    assert loops(together.layers) == layer_runs(plain)
    with interpreter():
        found = jax.tree.map(np.asarray, jax.jit(functools.partial(hidden, together))())
        apart = jax.tree.map(np.asarray, jax.jit(functools.partial(hidden, plain))())
    for one, other in zip(*map(jax.tree.leaves, (found, apart)), strict=True):
        np.testing.assert_array_equal(one, other)
    x, *pages, choices = found
    if plain.config.mla:
        rope = plain.config.mla.qk_rope_head_dim
        assert pages[1].shape[-1] == 128 and not pages[1][..., rope:].any()
        pages[1] = pages[1][..., :rope]
    elif not plain.config.qk_norm:
        half = plain.config.head_dim // 2  # with zeros after each
        halves = [its.reshape(*its.shape[:-1], 2, 64) for its in pages]
        pages = [its[..., :half].reshape(*its.shape[:-2], 2 * half) for its in halves]
    found = x, *pages, choices
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_only_layers_of_the_same_slots_are_a_loop(stacked):
    """The middle layer has no slots for q_proj."""
    config = read_config(GOLDEN / "qwen3/base")
    names = projections(abstract_model(config, adapters=SlotConfig(1, 1)))
    last = config.num_layers - 1
    targets = frozenset(name for name in names if f"layers.{last}.self_attn.q_proj" not in name)
    slots = SlotConfig(2, 4, "float32", targets)
    model = random_model(config, dtype="float32", adapters=slots)
    arrays = ModelArrays(model, config, None)
    assert loops(model.layers, nnx.Param) == [range(last), range(last, config.num_layers)]
    merged = arrays.merge(arrays.base, arrays.bank.stacks)
    assert loops(merged.layers) == loops(model.layers, nnx.Param)
    assert {name: place.index for name, place in arrays.bank.classes[4].places.items()} == {
        name: int(name.split(".")[2]) if "layers" in name and f".{last}." not in name else 0
        for name in targets
    }


def test_weights_are_passed_once(stacked):
    model = load("deepseek_v3", SlotConfig(1, 2, "float32"))
    arrays = ModelArrays(model, model.config, None)
    state = jax.tree.leaves(nnx.state(model, nnx.Param), is_leaf=is_layered)
    assert len(arrays.base) == len({id(its) for its in arrays.base}) < len(state)
    assert sum(its.size for its in arrays.base) == sum(math.prod(its.shape) for its in state)
