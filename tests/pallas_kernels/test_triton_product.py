"""The general GPU kernels; off a GPU they run in Pallas's interpreter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Lora, grouped_lora_matmul, lora_matmul
from pallas_kernels.grouped_lora_matmul import triton
from tests.pallas_kernels.cases import jitted, make_bias, make_case
from tests.pallas_kernels.test_grouped_lora_matmul import SHAPES, check

SLOTS = np.array([-1, 0, 1], np.int32)


def sizes_and_slots(shape):
    """An empty group, ragged ones, and rows past the last."""
    weights = np.arange(shape.groups) * 2 + (shape.groups == 1)
    sizes = (weights * (shape.rows - 3) // weights.sum()).astype(np.int32)
    rng = np.random.default_rng(1)
    return sizes, rng.integers(-1, shape.slots, shape.rows).astype(np.int32)


@pytest.fixture(params=[triton.LOW, pytest.param(triton.TALL, marks=pytest.mark.slow)], ids=str)
def tile(request, monkeypatch):
    """Every product in tiles of one size."""
    monkeypatch.setattr(triton, "tile_of", lambda *_: request.param)
    jitted.cache_clear()
    yield request.param
    jitted.cache_clear()


def test_sums_of_bfloat16_may_stay_float32():
    shape = SHAPES["bfloat16"]
    check(shape, make_case(shape, *sizes_and_slots(shape)), "triton", jnp.float32)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_definition(name):
    check(SHAPES[name], make_case(SHAPES[name], *sizes_and_slots(SHAPES[name])), "triton")


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("name", ["fused, one part without adapters", "bfloat16"])
def test_a_bias_of_each_group(name):
    case = make_case(SHAPES[name], *sizes_and_slots(SHAPES[name]))
    check(SHAPES[name], case, "triton", bias=make_bias(case))


def dense(rows, dtype=jnp.float32, seed=0):
    """Few features of many, as of a router."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    x, w = normal(rows, 70), normal(40, 70).astype(jnp.bfloat16)
    lora = Lora(normal(2, 1, 5, 70), normal(2, 1, 5, 40), jnp.asarray([[0.5], [2.0]]))
    slots = jnp.asarray(rng.choice(SLOTS, rows))
    return x, w, slots, lora


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
def test_bits_of_a_row_are_its_own(dtype):
    """In a batch of so many rows that tiles are tall, too; the interpreter's always are."""
    count = 3000 if jax.default_backend() == "gpu" else 300
    x, w, slots, lora = dense(count, dtype)
    run = functools.partial(lora_matmul, out_dtype=jnp.float32, implementation="triton")
    run = jax.jit(run)
    together = run(x, w, slots, (lora,))
    for rows in (slice(0, 1), slice(5, 40), slice(37, 70), slice(count - 100, count)):
        np.testing.assert_array_equal(run(x[rows], w, slots[rows], (lora,)), together[rows])


def test_a_poisoned_slot_stays_alone():
    x, w, slots, lora = dense(40)
    poisoned = lora._replace(a=lora.a.at[1].set(jnp.nan), b=lora.b.at[1].set(jnp.inf))
    run = jax.jit(functools.partial(lora_matmul, implementation="triton"))
    clean, found = run(x, w, slots, (lora,)), run(x, w, slots, (poisoned,))
    others = np.asarray(slots) != 1
    np.testing.assert_array_equal(found[others], clean[others])


def test_gradients():
    x, w, slots, lora = dense(9)
    dy = jnp.asarray(np.random.default_rng(2).standard_normal((9, 40)), jnp.float32)

    def loss(implementation, x, lora):
        return (lora_matmul(x, w, slots, (lora,), implementation=implementation) * dy).sum()

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1)))(x, lora)
        for name in ("triton", "xla")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_refusals_name_the_shapes():
    with pytest.raises(NotImplementedError, match=r"triton: .*x float32\[0, 70\]"):
        x, w, _, _ = dense(0)
        grouped_lora_matmul(x, w[None], jnp.zeros(1, jnp.int32), implementation="triton")
