"""`moe_mlp` against one token and one choice at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Gate, Layered, Lora, moe_mlp
from tests.pallas_kernels.class_cases import RankClass, in_classes, padded

TOKENS, CHOICES, EXPERTS, SLOTS, RANK = 13, 3, 5, 3, 4
HIDDEN, WIDTH = 256, 128  # served by every kernel
GPT_OSS = Gate(limit=0.7, alpha=1.702, up_offset=1.0)
OUTER = ("gate.a", "up.a", "down.b")
SHARED = {
    "per expert": (),
    "shared outer": OUTER,
    "shared outer, one scaling": (*OUTER, "gate.s", "up.s", "down.s"),
    "gate's alone": ("gate.a", "gate.s"),
    "shared inner": ("gate.b", "down.a", "down.s"),
}
LORA = ("lora_gate", "lora_up", "lora_down")
TOKEN_ARRAYS = ("x", "experts", "weights", "token_slots")
SHARED_OR_NOT = pytest.mark.parametrize("shared", [(), OUTER], ids=["per expert", "shared outer"])
# Where each compiles.
SHARED_MOSTLY = pytest.mark.parametrize(
    "shared",
    [
        pytest.param((), id="per expert", marks=pytest.mark.slow),
        pytest.param(OUTER, id="shared outer"),
    ],
)


@pytest.fixture(scope="module")
def dtype(implementation):
    """What the kernels serve, plain JAX's errors being smallest in float32."""
    return np.dtype("float32" if implementation == "xla" else jnp.bfloat16)


@functools.cache
def jitted(implementation, gate=None, first_group=0):
    return jax.jit(
        functools.partial(
            moe_mlp, gate=gate, first_group=first_group, implementation=implementation
        )
    )


def run(implementation, call, **options):
    """The layer, compiled once for all arguments of the same shapes."""
    valid = {} if "valid" not in options else {"valid": options.pop("valid")}
    return np.asarray(jitted(implementation, **options)(**call, **valid))


def arguments(
    shared=(),
    seed=0,
    dtype=np.float32,
    width=WIDTH,
    *,
    hidden=HIDDEN,
    tokens=TOKENS,
    count=EXPERTS,
    slots=SLOTS,
    rank=RANK,
):
    """Random arguments; `shared` names the factors that all of the `count` experts share."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(dtype)

    def pair(name, n_in, n_out):
        groups = [1 if f"{name}.{factor}" in shared else count for factor in "abs"]
        scaling = rng.uniform(0.5, 2, (slots, groups[2])).astype(np.float32)
        a, b = normal(slots, groups[0], rank, n_in), normal(slots, groups[1], rank, n_out)
        return Lora(a, b * dtype.type(rank), scaling)

    dtype = np.dtype(dtype)
    experts = np.stack([rng.permutation(count)[:CHOICES] for _ in range(tokens)])
    return dict(
        x=normal(tokens, hidden) * dtype.type(4),
        experts=experts.astype(np.int32),
        weights=rng.uniform(0.1, 1, (tokens, CHOICES)).astype(np.float32),
        token_slots=rng.integers(-1, slots, tokens).astype(np.int32),
        gate_up=normal(count, 2 * width, hidden),
        down=normal(count, hidden, width),
        lora_gate=pair("gate", hidden, width),
        lora_up=pair("up", hidden, width),
        lora_down=pair("down", width, hidden),
    )


def biased(call):
    """With biases of gate and up, of the size of what they are added to."""
    bias = np.random.default_rng(9).standard_normal((EXPERTS, 2 * WIDTH))
    return call | {"gate_up_bias": bias.astype(call["x"].dtype)}


def one_by_one(call, gate=None, first=0, valid=None):
    """The definition, in float64."""
    gate = gate or Gate()
    y = np.zeros((TOKENS, HIDDEN))
    for t in range(TOKENS):
        slot, x = int(call["token_slots"][t]), call["x"][t].astype(np.float64)
        for choice in range(CHOICES):
            expert = int(call["experts"][t, choice]) - first
            if not 0 <= expert < call["down"].shape[0] or (valid is not None and not valid[t]):
                continue
            both = call["gate_up"][expert].astype(np.float64) @ x
            if "gate_up_bias" in call:
                both += call["gate_up_bias"][expert].astype(np.float64)
            left = both[:WIDTH] + delta(call["lora_gate"], slot, expert, x)
            right = both[WIDTH:] + delta(call["lora_up"], slot, expert, x)
            if gate.limit is not None:
                left, right = np.minimum(left, gate.limit), np.clip(right, -gate.limit, gate.limit)
            hidden = left / (1 + np.exp(-gate.alpha * left)) * (right + gate.up_offset)
            out = call["down"][expert].astype(np.float64) @ hidden
            out += delta(call["lora_down"], slot, expert, hidden)
            y[t] += call["weights"][t, choice] * out
    return y


def delta(pair, slot, expert, x):
    if pair is None or slot < 0:
        return 0.0
    a, b, scaling = (f[slot, expert if f.shape[1] > 1 else 0].astype(np.float64) for f in pair)
    return scaling * (a @ x) @ b


def assert_close(found, expected, dtype):
    tolerance = 2e-5 if dtype == np.float32 else 3e-2
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "shared, gate",
    [
        ("per expert", None),
        ("shared outer", None),
        ("shared inner", None),
        ("per expert", GPT_OSS),
        pytest.param("shared outer, one scaling", None, marks=pytest.mark.slow),
        pytest.param("gate's alone", None, marks=pytest.mark.slow),
        pytest.param("shared outer", GPT_OSS, marks=pytest.mark.slow),
    ],
)
def test_values(shared, gate, implementation, dtype):
    call = arguments(SHARED[shared], dtype=dtype)
    found = run(implementation, call, gate=gate)
    assert found.dtype == np.float32
    assert_close(found, one_by_one(call, gate), dtype)


@pytest.mark.parametrize("shared", [(), pytest.param(OUTER, marks=pytest.mark.slow)])
def test_biases_of_gate_and_up(shared, implementation, dtype):
    call = biased(arguments(shared, dtype=dtype))
    together = run(implementation, call, gate=GPT_OSS)
    assert_close(together, one_by_one(call, GPT_OSS), dtype)
    without = run(implementation, call | {"gate_up_bias": 0 * call["gate_up_bias"]}, gate=GPT_OSS)
    assert abs(together - without).max() > 0.1
    for t in range(3):
        alone = call | {name: call[name][t : t + 1] for name in TOKEN_ARRAYS}
        np.testing.assert_array_equal(run(implementation, alone, gate=GPT_OSS)[0], together[t])
    stacks = {
        name: Layered(jnp.stack([0 * call[name], call[name]]), 1)
        for name in ("gate_up", "down", "gate_up_bias")
    }
    np.testing.assert_array_equal(run(implementation, call | stacks, gate=GPT_OSS), together)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [16, 32])
def test_one_token_of_an_engine_with_slots(rank, implementation, dtype):
    """Without an adapter it has the bits of an engine without; a wide row's stages come round."""
    hidden, width, groups = 2048, 384, 4
    rng = np.random.default_rng(rank)

    def normal(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(dtype)

    def pair(n_in, n_out):
        a, b = normal(2, groups, rank, n_in), normal(2, groups, rank, n_out)
        return Lora(a, b, np.ones((2, groups), np.float32))

    call = dict(
        x=normal(1, hidden) * dtype.type(hidden**0.5),
        experts=np.array([[2, 0, 3]], np.int32),
        weights=np.array([[0.5, 0.3, 0.2]], np.float32),
        token_slots=np.array([-1], np.int32),
        gate_up=normal(groups, 2 * width, hidden),
        down=normal(groups, hidden, width),
    )
    pairs = pair(hidden, width), pair(hidden, width), pair(width, hidden)
    slots = dict(zip(LORA, pairs, strict=True))
    base = run(implementation, call)
    np.testing.assert_array_equal(run(implementation, call | slots), base)
    its = run(implementation, call | slots | {"token_slots": np.array([1], np.int32)})
    assert abs(its - base).max() > 0.01


def decode_step(ranks, dtype, slots=5):
    """So many experts' tiles that a GPU has one kernel for them; the ranks of gate and up, and of
    down."""
    tokens, choices, groups, hidden, width = 40, 4, 16, 256, 1536
    rng = np.random.default_rng(ranks)

    def normal(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(dtype)

    def pair(rank, n_in, n_out):
        a, b = normal(slots, groups, rank, n_in), normal(slots, groups, rank, n_out)
        return Lora(a, b * dtype.type(rank), np.ones((slots, groups), np.float32))

    return dict(
        x=normal(tokens, hidden) * dtype.type(hidden**0.5),
        experts=np.argsort(rng.random((tokens, groups)))[:, :choices].astype(np.int32),
        weights=rng.uniform(0.1, 1, (tokens, choices)).astype(np.float32),
        token_slots=rng.integers(-1, slots, tokens).astype(np.int32),
        gate_up=normal(groups, 2 * width, hidden),
        down=normal(groups, hidden, width),
        lora_gate=pair(ranks[0], hidden, width),
        lora_up=pair(ranks[0], hidden, width),
        lora_down=pair(ranks[1], width, hidden),
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(16, 16), (64, 40), (8, 32)])
def test_tokens_of_a_decode_step(ranks, implementation, dtype):
    """Alone, in order of another batch, or beside a slot of NaN, they have the same bits."""
    call = decode_step(ranks, dtype)
    everyone = run(implementation, call)
    for token in (0, 17, 39):
        alone = call | {name: call[name][token : token + 1] for name in TOKEN_ARRAYS}
        np.testing.assert_array_equal(run(implementation, alone)[0], everyone[token])
    order = np.random.default_rng(2).permutation(len(everyone))
    moved = call | {name: call[name][order] for name in TOKEN_ARRAYS}
    np.testing.assert_array_equal(run(implementation, moved), everyone[order])
    broken, others = dict(call), call["token_slots"] != 1
    for name in LORA:
        broken[name] = call[name]._replace(a=call[name].a.copy(), b=call[name].b.copy())
        broken[name].a[1] = broken[name].b[1] = np.nan
    found = run(implementation, broken)
    np.testing.assert_array_equal(found[others], everyone[others])
    assert not np.isfinite(found[~others]).any()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 40])
def test_two_layers_of_one_routing(tokens, implementation, dtype):
    """A compiler makes one of what they do alike: their tables, and where kernels count."""
    call = decode_step((16, 16), dtype)
    call |= {name: call[name][:tokens] for name in TOKEN_ARRAYS}
    other = call | {
        "gate_up": -call["gate_up"],
        "lora_down": call["lora_down"]._replace(b=-call["lora_down"].b),
    }
    layer = functools.partial(moe_mlp, implementation=implementation)
    both = jax.jit(lambda one, two: (layer(**one), layer(**two)))(call, other)
    for its, found in zip((call, other), both, strict=True):
        np.testing.assert_array_equal(found, run(implementation, its))


@pytest.mark.slow
def test_a_decode_step_in_rank_classes(implementation, dtype):
    """Slots of two ranks have the bits of their zeros in one bank; rows of no group are zeros."""
    classes = [RankClass(3, 8), RankClass(2, 32)]
    call = decode_step((32, 32), dtype)
    one, several = dict(call), dict(call)
    for name in LORA:
        pair = call[name]
        one[name] = pair._replace(a=padded(pair.a, classes), b=padded(pair.b, classes))
        several[name] = in_classes(pair, classes)
    valid = np.arange(len(call["x"])) % 5 > 0
    found = run(implementation, several, valid=valid)
    np.testing.assert_array_equal(found, run(implementation, one, valid=valid))
    assert not found[~valid].any() and found[valid].any(axis=1).all()
    without = run(implementation, call | dict.fromkeys(LORA), valid=valid)
    base = call["token_slots"] < 0
    np.testing.assert_array_equal(found[base], without[base])


def test_without_adapters(implementation, dtype):
    call = arguments(dtype=dtype) | dict.fromkeys(LORA)
    assert_close(run(implementation, call), one_by_one(call), dtype)


@SHARED_MOSTLY
def test_local_experts_and_padding_tokens(shared, implementation, dtype):
    """Nothing of other devices' choices, not even where they left the adapter's columns undone."""
    call = arguments(shared, dtype=dtype)
    local = {"gate_up": call["gate_up"][1:4], "down": call["down"][1:4]}
    for name in LORA:
        factors = (v[:, 1:4] if v.shape[1] > 1 else v for v in call[name])
        local[name] = Lora(*factors)
    call |= local
    valid = np.arange(TOKENS) < 10
    call["x"][~valid] = np.nan
    found = run(implementation, call, first_group=1, valid=valid)
    assert_close(found, one_by_one(call, first=1, valid=valid), dtype)
    assert not found[~valid].any()


@pytest.mark.parametrize("width", [WIDTH, 64])  # the last fills one line of two that h has
@SHARED_MOSTLY
def test_a_token_alone_has_the_same_bits(shared, width, implementation, dtype):
    call = arguments(shared, dtype=dtype, width=width)
    everyone = run(implementation, call)
    for token in (0, 5, TOKENS - 1):
        alone = call | {name: call[name][token : token + 1] for name in TOKEN_ARRAYS}
        assert np.array_equal(run(implementation, alone)[0], everyone[token])


@SHARED_OR_NOT
def test_the_other_tokens_change_no_bits(shared, implementation, dtype):
    """Their values, their adapters, their order."""
    call, other = arguments(shared, dtype=dtype), arguments(shared, seed=1, dtype=dtype)
    everyone = run(implementation, call)
    kept = np.arange(TOKENS) % 3 == 0
    mixed = dict(call)
    for name in TOKEN_ARRAYS:
        mask = kept.reshape(-1, *[1] * (call[name].ndim - 1))
        mixed[name] = np.where(mask, call[name], other[name])
    assert np.array_equal(run(implementation, mixed)[kept], everyone[kept])
    order = np.random.default_rng(2).permutation(TOKENS)
    moved = call | {name: call[name][order] for name in TOKEN_ARRAYS}
    assert np.array_equal(run(implementation, moved), everyone[order])


@SHARED_OR_NOT
@pytest.mark.parametrize("field", ["a", "b", "scaling"])
def test_a_broken_slot_stays_alone(shared, field, implementation, dtype):
    call = arguments(shared, dtype=dtype)
    sound, broken = run(implementation, call), dict(call)
    for name in LORA:
        values = np.array(getattr(call[name], field))
        values[1] = np.nan
        broken[name] = call[name]._replace(**{field: values})
    found = run(implementation, broken)
    others = call["token_slots"] != 1
    assert np.array_equal(found[others], sound[others])
    assert not np.isfinite(found[~others]).any()


DIFFERENTIABLE = ("x", "weights", "lora_gate", "lora_up", "lora_down")


@functools.cache
def jitted_gradients(implementation):
    """(call, dy) to the layer's value and the gradients of `DIFFERENTIABLE`."""

    def gradients(call, dy):
        def layer(*values):
            values = dict(zip(DIFFERENTIABLE, values, strict=True))
            return moe_mlp(**(call | values), implementation=implementation)

        y, pullback = jax.vjp(layer, *(call[name] for name in DIFFERENTIABLE))
        return y, pullback(dy)

    return jax.jit(gradients)


def dense(call, dy):
    """The same by automatic differentiation of a dense formula."""
    experts, slots = call["experts"], call["token_slots"]

    def product(x, w, pair):
        if pair is None:
            return jnp.einsum("tkn,tkmn->tkm", x, w[experts])
        a, b, scaling = (
            v[jnp.maximum(slots, 0)[:, None], experts if v.shape[1] > 1 else 0] for v in pair
        )
        u = scaling[..., None] * jnp.einsum("tkn,tkrn->tkr", x, a)
        low = jnp.einsum("tkr,tkrn->tkn", u, b)
        low = jnp.where((slots >= 0)[:, None, None], low, 0)
        return jnp.einsum("tkn,tkmn->tkm", x, w[experts]) + low

    def layer(x, weights, lora_gate, lora_up, lora_down):
        x = jnp.broadcast_to(x[:, None], (TOKENS, CHOICES, HIDDEN))
        gate = product(x, call["gate_up"][:, :WIDTH], lora_gate)
        up = product(x, call["gate_up"][:, WIDTH:], lora_up)
        if "gate_up_bias" in call:
            of_gate, of_up = jnp.split(call["gate_up_bias"][experts], 2, axis=-1)
            gate, up = gate + of_gate, up + of_up
        rows = product(jax.nn.silu(gate) * up, call["down"], lora_down)
        return jnp.einsum("tk,tkh->th", weights, rows)

    y, pullback = jax.vjp(layer, *(call[name] for name in DIFFERENTIABLE))
    return y, pullback(dy)


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param("per expert", marks=pytest.mark.slow),
        pytest.param("shared outer", marks=pytest.mark.slow),
        pytest.param("shared outer, one scaling", marks=pytest.mark.slow),
        "no adapters",
        "biases",
    ],
)
def test_gradients(shared, implementation, dtype):
    """Against automatic differentiation in float64, where the kernels serve it exactly."""
    exact = dtype == np.float32
    call = arguments(SHARED.get(shared, ()), dtype=dtype)
    if shared == "no adapters":
        call |= dict.fromkeys(LORA)
    if shared == "biases":
        call = biased(call)
    call["weights"][2, 1] = 0  # whose gradient is not
    wide = jax.tree.map(lambda v: v if v.dtype == np.int32 else v.astype(np.float64), call)
    dy = np.random.default_rng(3).standard_normal((TOKENS, HIDDEN))
    with jax.enable_x64(True):
        expected = jax.tree.map(np.asarray, jax.jit(dense)(wide, dy))
    with jax.enable_x64(exact):
        some = (wide, dy) if exact else (call, dy.astype(np.float32))
        found = jax.tree.map(np.asarray, jitted_gradients(implementation)(*some))
    tolerance = 1e-11 if exact else 2**-4
    for value, reference in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        size = max(1, np.abs(reference).max())
        np.testing.assert_allclose(
            value.astype(np.float64), reference, rtol=tolerance, atol=tolerance * size
        )


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, SLOTS])
def test_gradients_of_few_tokens(slots, implementation, dtype):
    """Those of many, the others of which count for nothing; few rows are not even sorted."""
    call = arguments(dtype=dtype)
    for name in LORA:
        call[name] = Lora(*(v[:slots] for v in call[name]))
    call["token_slots"] = np.minimum(call["token_slots"], slots - 1)
    few = 4
    dy = np.random.default_rng(3).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    dy[few:] = 0
    some = call | {name: call[name][:few] for name in TOKEN_ARRAYS}
    _, (*of_tokens, gate, up, down) = jitted_gradients(implementation)(call, dy)
    expected = *(v[:few] for v in of_tokens), gate, up, down
    _, found = jitted_gradients(implementation)(some, dy[:few])
    tolerance = 1e-5 if dtype == np.float32 else 2**-7
    for its, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        its, other = (np.asarray(v).astype(np.float64) for v in (its, other))
        size = np.abs(other).max()
        np.testing.assert_allclose(its, other, rtol=tolerance, atol=tolerance * size)


def in_float32(call):
    return jax.tree.map(lambda v: v if v.dtype == np.int32 else v.astype(np.float32), call)


def assert_near(found, expected):
    """Of what kernels make of bfloat16, each array as a whole."""
    for its, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        its, other = (np.asarray(v).astype(np.float64) for v in (its, other))
        assert np.linalg.norm(its - other) < 1e-2 * np.linalg.norm(other)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 40, 300, 1000])
@pytest.mark.parametrize("hidden, width", [(320, 64), (768, 192), (1280, 128)])
def test_layers_of_other_sizes(tokens, hidden, width):
    """Neither whole steps of K nor whole tiles; each number of tokens has other kernels."""
    sizes = dict(tokens=tokens, count=20, rank=12, hidden=hidden, width=width)
    call = arguments(dtype=jnp.bfloat16, **sizes)
    call["token_slots"][0] = 0
    assert_near(jitted("mosaic_gpu")(**call), jitted("xla")(**in_float32(call)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "slots, rank, hidden, width",
    [(2, 16, 256, 128), (16, 8, 256, 192), (1, 20, 768, 64), (2, 48, 320, 192)],
)
def test_gradients_of_many_tokens(slots, rank, hidden, width):
    """More than 2048 rows, whose kernels are others; against plain JAX in float32."""
    sizes = dict(tokens=1000, count=64, slots=slots, rank=rank, hidden=hidden, width=width)
    call = arguments(dtype=jnp.bfloat16, **sizes)
    dy = np.random.default_rng(3).standard_normal(call["x"].shape).astype(np.float32)
    found = jitted_gradients("mosaic_gpu")(call, dy)
    assert_near(found, jitted_gradients("xla")(in_float32(call), dy))


@pytest.mark.parametrize("shared", [OUTER, pytest.param((), marks=pytest.mark.slow)])
def test_gradients_of_a_broken_slot_stay_alone(shared, implementation, dtype):
    call = arguments(shared, dtype=dtype)
    dy = np.random.default_rng(3).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    _, sound = jax.tree.map(np.asarray, jitted_gradients(implementation)(call, dy))
    for name in LORA:
        broken = call[name]._replace(a=call[name].a.copy(), b=call[name].b.copy())
        broken.a[1], broken.b[1] = np.nan, np.inf
        call[name] = broken
    _, found = jax.tree.map(np.asarray, jitted_gradients(implementation)(call, dy))
    others = call["token_slots"] != 1
    for value, reference in zip(found[:2], sound[:2], strict=True):
        assert np.array_equal(value[others], reference[others])
    for value, reference in zip(*map(jax.tree.leaves, (found[2:], sound[2:])), strict=True):
        assert np.array_equal(value[[0, 2]], reference[[0, 2]])


@pytest.mark.parametrize("shared", [OUTER, pytest.param((), marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_training_sees_the_bits_that_serving_made(shared, dtype):
    """Plain JAX: the forward pass that keeps what gradients need gives the same values."""
    call = arguments(shared, dtype=jnp.dtype(dtype))
    call = biased(call) if shared else call
    served = run("xla", call)
    trained, _ = jitted_gradients("xla")(call, np.ones((TOKENS, HIDDEN), np.float32))
    assert np.array_equal(trained, served)


def test_shapes_that_do_not_belong_together():
    call = arguments()
    with pytest.raises(ValueError, match="experts"):
        moe_mlp(**(call | {"weights": call["weights"][:, :2]}))
    for down in call["down"][:, :, :-1], call["down"][:, :-1], call["down"][:-1]:
        with pytest.raises(ValueError, match="down must be"):
            moe_mlp(**(call | {"down": down}))
    with pytest.raises(
        ValueError, match=r"gate_up_bias must be float32\[5, 256\].* got float32\[5, 128\]"
    ):
        moe_mlp(**call, gate_up_bias=np.zeros((EXPERTS, WIDTH), np.float32))
    fewer = Lora(*(v[:2] for v in call["lora_up"]))
    with pytest.raises(ValueError, match="same number of slots"):
        moe_mlp(**(call | {"lora_up": fewer}))
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        moe_mlp(**call, implementation="mosaic_gpu")
