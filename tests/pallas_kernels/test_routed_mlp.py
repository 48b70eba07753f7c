"""`routed_mlp` against its parts: the same bits, whichever kernels there are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Gate, Lora, Scoring, moe_mlp, routed_mlp, top_experts
from pallas_kernels.implementation import platform_implementation
from pallas_kernels.rounded import added, rounded
from tests.pallas_kernels.cases import assert_same

EXPERTS, SLOTS, HIDDEN, WIDTH = 32, 3, 256, 128  # served by every kernel
QWEN3, DEEPSEEK = Scoring(), Scoring(sigmoid=True, scale=2.5)
SPREAD = Scoring(normalise=False)


@pytest.fixture(scope="module")
def dtype(implementation):
    return np.dtype("float32" if implementation == "xla" else jnp.bfloat16)


def arguments(dtype, tokens, rank=4, slots=SLOTS, logits_dtype=None, biased=False, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(dtype)

    def pair(n_in, n_out):
        a, b = normal(slots, EXPERTS, rank, n_in), normal(slots, EXPERTS, rank, n_out)
        return Lora(a, b, rng.uniform(0.5, 2, (slots, EXPERTS)).astype(np.float32))

    sizes = (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    call = dict(
        x=normal(tokens, HIDDEN) * dtype.type(4),
        logits=rng.standard_normal((tokens, EXPERTS)).astype(logits_dtype or dtype),
        token_slots=rng.integers(-1, slots, tokens).astype(np.int32),
        gate_up=normal(EXPERTS, 2 * WIDTH, HIDDEN),
        down=normal(EXPERTS, HIDDEN, WIDTH),
    )
    if rank:
        names = "lora_gate", "lora_up", "lora_down"
        call |= {name: pair(*its) for name, its in zip(names, sizes, strict=True)}
    if biased:
        call["gate_up_bias"] = normal(EXPERTS, 2 * WIDTH)
        call["correction"] = rng.uniform(0, 0.3, EXPERTS).astype(np.float32)
    return call


def parts(*, logits, correction=None, top_k, scoring, residual=None, **others):
    """The definition."""
    experts, weights = top_experts(logits, correction, top_k, scoring)
    weights = rounded(weights, logits.dtype)
    y = moe_mlp(experts=experts, weights=weights, **others)
    if residual is not None:
        y = added(residual, rounded(y, residual.dtype))
    return y, experts, weights


@functools.cache
def jitted(function, top_k, scoring, gate, implementation):
    options = dict(top_k=top_k, scoring=scoring, gate=gate, implementation=implementation)
    return jax.jit(functools.partial(function, **options))


def run(function, call, *, top_k=4, scoring=QWEN3, gate=None, implementation):
    found = jitted(function, top_k, scoring, gate, implementation)(**call)
    return jax.tree.map(np.asarray, found)


def check(call, **options):
    found, expected = (run(function, call, **options) for function in (routed_mlp, parts))
    assert_same(found, expected)
    return found


@pytest.mark.parametrize(
    "tokens, rank",
    [
        (1, 24),
        *(
            pytest.param(*its, marks=pytest.mark.slow)
            for its in ((1, 0), (2, 24), (3, 24), (9, 24))
        ),
    ],
)
def test_equals_its_parts(tokens, rank, implementation, dtype):
    """Of so few rows that one kernel has all of it, of some, and of more."""
    check(arguments(dtype, tokens, rank), implementation=implementation)


@pytest.mark.parametrize("tokens", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_with_a_residual(tokens, implementation, dtype):
    call = arguments(dtype, tokens)
    residual = np.random.default_rng(3).standard_normal((tokens, HIDDEN)).astype(dtype)
    found, *_ = check(call | {"residual": residual}, implementation=implementation)
    assert found.dtype == dtype
    alone, *_ = check(call, implementation=implementation)
    expected = np.float32(residual) + np.float32(alone)
    # Rounded before and after; y is no larger than the residual.
    most = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.float32(found), expected, rtol=most, atol=most)
    assert np.abs(expected - np.float32(residual)).max() > most


@pytest.mark.slow
@pytest.mark.parametrize("slot", [-1, 0, 2])
@pytest.mark.parametrize("logits_dtype", ["float32", None])
@pytest.mark.parametrize("scoring", [QWEN3, DEEPSEEK, SPREAD], ids=["Qwen3", "V3", "V2"])
def test_one_token(slot, logits_dtype, scoring, implementation, dtype):
    call = arguments(dtype, 1, logits_dtype=logits_dtype, biased=scoring is DEEPSEEK)
    call["token_slots"][:] = slot
    gate = Gate(7.0, 1.702, 1.0) if scoring is DEEPSEEK else None
    check(call, top_k=6, scoring=scoring, gate=gate, implementation=implementation)


@pytest.mark.slow
def test_padding_and_broken_neighbours(implementation, dtype):
    """A token that is none, and another tenant's NaN, change nothing of the first one's."""
    call = arguments(dtype, 2)
    call["token_slots"][:] = 0, 2
    clean, *_ = check(call, implementation=implementation)
    padded, *_ = check(call | {"valid": np.array([True, False])}, implementation=implementation)
    np.testing.assert_array_equal(padded[0], clean[0])
    assert clean[1].any() and not padded[1].any()
    call["x"][1], call["logits"][1] = np.nan, np.nan
    call["lora_gate"].a[2], call["lora_down"].b[2] = np.nan, np.inf
    broken, *_ = check(call, implementation=implementation)
    np.testing.assert_array_equal(broken[0], clean[0])
    assert np.isnan(broken[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 9])
def test_gradients_are_those_of_its_parts(tokens, implementation, dtype):
    call = arguments(dtype, tokens)
    dy = np.random.default_rng(1).standard_normal((tokens, HIDDEN)).astype(np.float32)
    names = "x", "logits", "lora_gate", "lora_up", "lora_down"
    others = {name: value for name, value in call.items() if name not in names}

    def loss(function, some):
        options = dict(top_k=4, scoring=QWEN3, implementation=implementation)
        return jnp.sum(function(**some, **others, **options)[0] * dy)

    some = {name: call[name] for name in names}
    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, function)))(some)
        for function in (routed_mlp, parts)
    )
    for its, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.asarray(other).any()
        np.testing.assert_array_equal(np.asarray(its), np.asarray(other))


def test_logits_are_of_each_token_and_expert():
    call = arguments(np.dtype("float32"), 2)
    for shape in ((2, EXPERTS - 1), (3, EXPERTS)):
        with pytest.raises(ValueError, match=rf"logits must be \[2, {EXPERTS}\].*{shape[1]}\]"):
            routed_mlp(**call | {"logits": np.zeros(shape, np.float32)}, top_k=4, scoring=QWEN3)


def test_a_residual_is_like_x():
    call = arguments(np.dtype("float32"), 2)
    for wrong in (call["x"][:1], call["x"].astype(np.float16)):
        with pytest.raises(ValueError, match=r"residual must be float32\[2, 256\].*got float"):
            routed_mlp(**call, residual=wrong, top_k=4, scoring=QWEN3)


@pytest.mark.gpu
def test_on_hopper_one_token_is_one_kernel(dtype):
    if platform_implementation() != "mosaic_gpu":
        pytest.skip("not a Hopper GPU")
    call = arguments(dtype, 1)
    text = jitted(routed_mlp, 4, QWEN3, None, None).lower(**call).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
