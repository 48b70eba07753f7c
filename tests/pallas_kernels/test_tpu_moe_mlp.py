"""`moe_mlp` on the TPU kernels in the interpreter, forward and backward, against plain JAX."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import Lora, moe_mlp
from tests.pallas_kernels.tpu_cases import assert_close
from tests.pallas_kernels.tpu_interpreter import interpreter

pytestmark = pytest.mark.interpreter

TOKENS, CHOICES, EXPERTS, SLOTS, RANK, HIDDEN, WIDTH = 7, 2, 3, 2, 3, 24, 20


def arguments(shared: tuple[str, ...] | None, biased: bool, seed=0):
    """(x, weights, adapters) and what has no gradient. `shared` names the factors that experts
    share; None leaves the adapters out."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    def pair(name, k, n):
        groups = [1 if f"{name}.{factor}" in shared else EXPERTS for factor in "abs"]
        a, b = normal(SLOTS, groups[0], RANK, k), normal(SLOTS, groups[1], RANK, n)
        return Lora(a, b, rng.uniform(0.5, 2, (SLOTS, groups[2])).astype(np.float32))

    sizes = dict(gate=(HIDDEN, WIDTH), up=(HIDDEN, WIDTH), down=(WIDTH, HIDDEN))
    lora = {} if shared is None else {f"lora_{name}": pair(name, *sizes[name]) for name in sizes}
    experts = np.stack([rng.permutation(EXPERTS + 1)[:CHOICES] for _ in range(TOKENS)])
    frozen = dict(
        experts=experts.astype(np.int32),  # the last one is another device's
        token_slots=rng.integers(-1, SLOTS, TOKENS).astype(np.int32),
        gate_up=normal(EXPERTS, 2 * WIDTH, HIDDEN),
        gate_up_bias=4 * normal(EXPERTS, 2 * WIDTH) if biased else None,
        down=normal(EXPERTS, HIDDEN, WIDTH),
    )
    weights = rng.uniform(0.1, 1, (TOKENS, CHOICES)).astype(np.float32)
    return (4 * normal(TOKENS, HIDDEN), weights, lora), frozen


def layer(frozen, implementation, x, weights, lora):
    return moe_mlp(x, weights=weights, implementation=implementation, **lora, **frozen)


def values(learned, frozen, dy, implementation):
    return jax.jit(functools.partial(layer, frozen, implementation))(*learned)


def gradients(learned, frozen, dy, implementation):
    @jax.jit
    def run(learned, dy):
        return jax.vjp(functools.partial(layer, frozen, implementation), *learned)[1](dy)

    return run(learned, dy)


SHARED = {
    "per expert": (),
    "shared outer": ("gate.a", "up.a", "down.b"),
    "no adapters": None,
    "biased": ("gate.b",),
}
QUICK = ((values, "biased"),)


@pytest.mark.parametrize(
    "function, shared",
    [
        pytest.param(
            function,
            shared,
            id=f"{function.__name__}, {shared}",
            marks=() if (function, shared) in QUICK else pytest.mark.slow,
        )
        for function in (values, gradients)
        for shared in SHARED
    ],
)
def test_against_plain_jax(function, shared):
    learned, frozen = arguments(SHARED[shared], shared == "biased")
    dy = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    expected = function(learned, frozen, dy, "xla")
    with interpreter():
        found = jax.tree.map(np.asarray, function(learned, frozen, dy, "mosaic_tpu"))
    for value, exact in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert value.shape == exact.shape and value.dtype == exact.dtype
        assert_close(value, exact, "float32")
