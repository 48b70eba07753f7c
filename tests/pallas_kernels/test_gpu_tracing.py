"""Every number of tokens has a schedule whose kernels can be traced: a second each, no device."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels import Lora, grouped_lora_matmul, implementation, lora_matmul, moe_mlp
from pallas_kernels.shapes import EXPERT_SHAPES

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need jax >= 0.11", allow_module_level=True)

# Both sides of the limits of `gpu_schedule` and `gpu_rows`.
TOKENS = (1, 3, 8, 32, 64, 150, 256, 300, 1024, 1500, 4096)
SOME_TOKENS = (3, 150, 4096)
RANK = 32


def layer(name: str, tokens: int, rank: int = RANK):
    """A layer's function, and the shapes of its arguments."""
    shape = EXPERT_SHAPES[name]
    groups, hidden, wide = shape.experts, shape.hidden, shape.intermediate

    def array(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def pair(n_in, n_out):
        a, b = array(8, groups, rank, n_in), array(8, groups, rank, n_out)
        return Lora(a, b, array(8, 1, dtype=jnp.float32))

    def function(*arrays):
        *arrays, bias = arrays if shape.biased else (*arrays, None)
        static = dict(gate=shape.gate, implementation="mosaic_gpu")
        return moe_mlp(*arrays, gate_up_bias=bias, **static)

    bias = (array(groups, 2 * wide),) if shape.biased else ()
    return function, (
        array(tokens, hidden),
        array(tokens, shape.top_k, dtype=jnp.int32),
        array(tokens, shape.top_k, dtype=jnp.float32),
        array(tokens, dtype=jnp.int32),
        array(groups, 2 * wide, hidden),
        array(groups, hidden, wide),
        pair(hidden, wide),
        pair(hidden, wide),
        pair(wide, hidden),
        *bias,
    )


@pytest.mark.parametrize(
    "name, tokens",
    [
        *(("qwen3-30b-a3b", tokens) for tokens in TOKENS),
        *((name, tokens) for name in ("deepseek-v3-ep8", "gpt-oss-20b") for tokens in SOME_TOKENS),
        *(
            pytest.param("deepseek-v3-ep8", tokens, marks=pytest.mark.slow)
            for tokens in TOKENS
            if tokens not in SOME_TOKENS
        ),
    ],
)
def test_every_number_of_tokens(name, tokens):
    function, arguments = layer(name, tokens)
    found = jax.eval_shape(function, *arguments)
    assert found.shape == (tokens, EXPERT_SHAPES[name].hidden) and found.dtype == jnp.float32


@pytest.mark.parametrize(
    "tokens, rank, shrinks", [(1, 32, 0), (1, 64, 1), (3, 32, 1), (3, 128, 1), (300, 32, 2)]
)
def test_kernels_that_make_u(tokens, rank, shrinks):
    """Products of one token do where ranks fit into a block, those of gate and up or of down alone;
    products of few rows where a shrink's stages fit into theirs, experts in one kernel for down,
    and what lays out many rows for gate and up."""
    function, arguments = layer("qwen3-30b-a3b", tokens, rank)
    text = str(jax.make_jaxpr(function)(*arguments))
    kernels = set(re.findall(r"lora_(?:spread_and_)?shrink_r\d+_k\d+_x\d", text))
    assert len(kernels) == shrinks, kernels
    assert any("spread" in name for name in kernels) == (tokens == 300)


@pytest.mark.parametrize(
    "rows, groups, classes, width, makes_u",
    [
        (1, 1, 1, 2048, True),
        (1, 1, 2, 64, False),
        (3, 3, 1, 2048, True),
        (3, 3, 2, 64, False),
        (3, 1, 1, 2048, False),
        (3, 1, 1, 64, True),
        (3, 1, 2, 64, False),
        (9, 1, 1, 64, False),
    ],
)
def test_products_of_equal_groups_that_make_u(rows, groups, classes, width, makes_u):
    """A row of a group of its own, or a router's, of slots of one rank: it would find no class of a
    slot."""

    def array(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def pair(rank):
        scaling = array(2, 1, dtype=jnp.float32)
        return Lora(array(2, groups, rank, 128), array(2, groups, rank, width), scaling)

    x, w, slots = array(rows, 128), array(groups, width, 128), array(rows, dtype=jnp.int32)
    lora = tuple(pair(rank) for rank in (8, 16)[:classes])
    function = functools.partial(grouped_lora_matmul, implementation="mosaic_gpu")
    kernels = str(jax.make_jaxpr(function)(x, w, None, slots, (lora,)))
    assert bool(re.search(r"lora_product_r\d+_shrink", kernels)) == makes_u
    assert bool(re.search(r"lora_product_r\d+", kernels))


@pytest.mark.parametrize(
    "k, parts, served",
    [
        (64, (32,), True),  # gpt-oss's router
        (64, (96,), True),
        (64, (128, 64), True),
        (64, (48,), False),
        (64, (64, 32), False),
        (96, (64,), False),
    ],
)
def test_widths_with_adapters(k, parts, served):
    def array(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def pair(width):
        a, b = (array(2, 1, 16, columns) for columns in (k, width))
        return Lora(a, b, array(2, 1, dtype=jnp.float32))

    x, w, slots = array(3, k), array(sum(parts), k), array(3, dtype=jnp.int32)
    function = functools.partial(lora_matmul, parts=parts, implementation="mosaic_gpu")
    lora = tuple(map(pair, parts))
    if served:
        assert jax.eval_shape(function, x, w, slots, lora).shape == (3, sum(parts))
    else:
        with pytest.raises(NotImplementedError, match="must be multiples of 64, N of 32"):
            jax.eval_shape(function, x, w, slots, lora)


@pytest.mark.parametrize(
    "name, tokens",
    [
        ("qwen3-30b-a3b", 1),
        ("qwen3-30b-a3b", 3),
        pytest.param("qwen3-30b-a3b", 300, marks=pytest.mark.slow),
        ("gpt-oss-20b", 1),
    ],
)
def test_gradients(name, tokens):
    function, (x, *rest) = layer(name, tokens)

    def total(x, pair, *rest):
        return jnp.sum(function(x, *rest[:5], pair, *rest[5:]))

    routed, (pair, *others) = rest[:5], rest[5:]
    found = jax.eval_shape(jax.grad(total, argnums=(0, 1)), x, pair, *routed, *others)
    assert jax.tree.map(lambda its: its.shape, found) == (
        x.shape,
        jax.tree.map(lambda v: v.shape, pair),
    )


@pytest.mark.parametrize("tokens, once", [(300, True), (200, False)])
def test_gradients_that_read_dy_once(tokens, once):
    """Of many rows: down's, and gate's and up's."""
    function, (x, *rest) = layer("qwen3-30b-a3b", tokens)

    def total(x, pairs, *rest):
        return jnp.sum(function(x, *rest, *pairs))

    routed, pairs = rest[:5], rest[5:]
    text = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(x, pairs, *routed))
    found = set(re.findall(r"lora_shrink_outer_r\d+_(n\d+_x\d)", text))
    assert found == ({"n2048_x1", "n1536_x2"} if once else set())


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_products_of_few_rows_in_groups(rows):
    """Of one row a product makes u, and finds its slot; a table says which group it is of."""

    def array(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    product = functools.partial(grouped_lora_matmul, implementation="mosaic_gpu")
    pair = Lora(array(4, 3, 16, 512), array(4, 3, 16, 128), array(4, 3, dtype=jnp.float32))
    x, w, sizes = array(rows, 512), array(3, 128, 512), array(3, dtype=jnp.int32)
    found = jax.eval_shape(product, x, w, sizes, array(rows, dtype=jnp.int32), (pair,))
    assert found.shape == (rows, 128)


@pytest.mark.parametrize("rank", [8, 32, 64])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v2-lite"])
def test_all_warps_wait_where_one_does(name, rank):
    """Each counts the phases of a barrier that it has seen; at another one all would wait for ever.

    Stages of the experts of one token have blocks for all warps, or for two of them.
    """
    function, arguments = layer(name, 1, rank)
    found = list(waits_of_warps(jax.make_jaxpr(function)(*arguments).jaxpr))
    assert found and not any(alone for alone in found)


@pytest.mark.parametrize("tokens, early", [(1, True), (40, True), (300, False)])
def test_kernels_of_few_rows_begin_early(monkeypatch, tokens, early):
    """All, or a later one would not know that those before it have ended; of many rows none."""
    monkeypatch.setattr(implementation, "DEPENDENT_LAUNCH", True)
    function, arguments = layer("qwen3-30b-a3b", tokens)
    found = list(kernels_in(jax.make_jaxpr(function)(*arguments).jaxpr))
    assert found and all(("griddepcontrol_wait" in text) == early for text in found)


def kernels_in(jaxpr):
    """The text of each Mosaic kernel."""
    for eqn in jaxpr.eqns:
        if "Mesh(" in str(eqn.params.get("meshes")):
            yield str(eqn)
            continue
        for sub, _ in jaxprs_in(eqn):
            yield from kernels_in(sub)


def waits_of_warps(jaxpr, warps=frozenset(), alone=None):
    """Of each wait for a barrier that warps do one by one, whether it depends on which warp it is.

    Args:
      warps: the variables that do. alone: that of the code around, None outside of such code.
    """
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "barrier_wait" and alone is not None:
            yield alone
        if any(is_in(its, warps) for its in eqn.invars) or (
            name == "axis_index" and alone is not None
        ):
            warps = warps | set(eqn.outvars)
        inside = False if "WarpMesh" in str(eqn.params.get("meshes")) else alone
        if inside is not None:
            inside |= name == "cond" and is_in(eqn.invars[0], warps)
        for sub, operands in jaxprs_in(eqn):
            taken = zip(sub.invars, operands, strict=False)
            inner = frozenset(var for var, its in taken if is_in(its, warps))
            yield from waits_of_warps(sub, inner, inside)


def is_in(atom, some):
    return not hasattr(atom, "val") and atom in some


@pytest.mark.parametrize("tokens", [3, 300])
def test_gradients_with_a_that_experts_share(tokens):
    """Of few rows, too, where the parts of what has one kernel are differentiated."""
    function, (x, *routed, gate, _, down) = layer("qwen3-30b-a3b", tokens)
    shared = gate._replace(a=jax.ShapeDtypeStruct((8, 1, RANK, x.shape[1]), x.dtype))

    def total(x, pair, *rest):
        return jnp.sum(function(x, *rest[:5], pair, pair, *rest[5:]))

    _, found = jax.eval_shape(jax.grad(total, argnums=(0, 1)), x, shared, *routed, down)
    assert found.a.shape == shared.a.shape


def jaxprs_in(eqn):
    """The programs that an operation runs, and what of its operands each takes."""
    params = eqn.params
    if eqn.primitive.name == "cond":
        return [(branch.jaxpr, eqn.invars[1:]) for branch in params["branches"]]
    if eqn.primitive.name == "while":
        consts = params["cond_nconsts"]
        return [(params["body_jaxpr"].jaxpr, eqn.invars[consts:])]
    subs = jax.tree.leaves(list(params.values()), is_leaf=lambda its: hasattr(its, "eqns"))
    subs = [getattr(sub, "jaxpr", sub) for sub in subs]
    return [(sub, eqn.invars) for sub in subs if hasattr(sub, "eqns")]


@pytest.mark.parametrize("tokens", [256, 300])
def test_u_of_gate_and_up_is_one_operand(tokens):
    """Made apart, or where rows are laid out: a function's results and arguments would be two."""
    function, arguments = layer("qwen3-30b-a3b", tokens)
    (kernel,) = kernels_of(jax.make_jaxpr(function)(*arguments).jaxpr, "lora_gated")
    shape = (8 * tokens, 64)
    assert [operand.aval.shape for operand in kernel.invars].count(shape) == 1


def kernels_of(jaxpr, name: str):
    """The calls of kernels of a name, wherever they are."""
    for equation in jaxpr.eqns:
        if name in str(equation.params.get("name", "")):
            yield equation
        else:
            for its in jaxprs_in_params(equation.params):
                yield from kernels_of(its, name)
