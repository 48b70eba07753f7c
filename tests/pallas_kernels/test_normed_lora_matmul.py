"""`normed_lora_matmul` against its parts: the same bits, whichever kernels there are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    Gate,
    Layered,
    Lora,
    add_norm,
    lora_matmul,
    normed_lora_matmul,
    rms_norm,
)
from pallas_kernels.implementation import platform_implementation
from tests.pallas_kernels.cases import assert_same

K, SLOTS, LAYERS, LAYER, EPS = 1024, 3, 2, 1, 1e-6
PARTS = 128, 64, 64


@pytest.fixture(scope="module")
def dtype(implementation):
    return np.dtype("float32" if implementation == "xla" else jnp.bfloat16)


def arguments(dtype, rows, more=True, parts=PARTS, rank=8, columns=K, biased=False):
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(dtype)

    lora = tuple(
        Lora(
            normal(LAYERS, SLOTS, 1, rank, columns, scale=columns**-0.5),
            normal(LAYERS, SLOTS, 1, rank, width),
            rng.uniform(0.5, 2, (LAYERS, SLOTS, 1)).astype(np.float32),
        )
        for width in parts
        if rank
    )
    w = normal(LAYERS, sum(parts), columns, scale=columns**-0.5)
    of_layer = dict(norm_weight=normal(LAYERS, columns), w=w, lora=lora)
    if biased:
        of_layer["bias"] = normal(LAYERS, sum(parts))
    rows_of = dict(
        x=normal(rows, columns, scale=3.0),
        more=normal(rows, columns) if more else None,
        row_slots=rng.integers(0, SLOTS, rows).astype(np.int32),
    )
    return rows_of, of_layer


def together(x, more, norm_weight, w, row_slots, lora, **options):
    return normed_lora_matmul(x, more, norm_weight, EPS, w, row_slots, lora, **options)


def parts_of_it(x, more, norm_weight, w, row_slots, lora, **options):
    """The definition."""
    if more is None:
        total, normed = x, rms_norm(x, norm_weight, EPS)
    else:
        total, normed = add_norm(x, more, norm_weight, EPS)
    return total, normed, lora_matmul(normed, w, row_slots, lora, **options)


def run(function, rows, of_layer, **options):
    """Of a layer among several."""

    @jax.jit
    def layered(rows, of_layer, layer):
        part = jax.tree.map(lambda its: Layered(its, layer, 0), of_layer)
        return function(**rows, **part, **options)

    return jax.tree.map(np.asarray, layered(rows, of_layer, jnp.int32(LAYER)))


def check(rows, of_layer, **options):
    found, expected = (
        run(function, rows, of_layer, **options) for function in (together, parts_of_it)
    )
    assert_same(found, expected)
    return found


@pytest.mark.parametrize(
    "rows, more",
    [(1, True), *(pytest.param(*its, marks=pytest.mark.slow) for its in ((1, False), (5, True)))],
)
def test_equals_its_parts(rows, more, implementation, dtype):
    """Of the one row that a kernel norms, and of several."""
    options = dict(parts=PARTS, implementation=implementation)
    check(*arguments(dtype, rows, more, biased=True), **options)


@pytest.mark.slow
@pytest.mark.parametrize("slot", [-1, 2])
@pytest.mark.parametrize(
    "parts, rank, columns, gate",
    [
        ((256,), 24, 2048, None),
        ((32,), 16, 3072, None),
        (PARTS, 0, 1024, None),
        ((64, 64), 8, 1024, Gate()),
        ((64,), 8, 320, None),  # apart
    ],
)
def test_sizes(parts, rank, columns, gate, slot, implementation, dtype):
    rows, of_layer = arguments(dtype, 1, True, parts, rank, columns)
    rows["row_slots"][:] = slot
    check(rows, of_layer, parts=parts, gate=gate, implementation=implementation)


@pytest.mark.slow
def test_logits_in_float32(implementation, dtype):
    rows, of_layer = arguments(dtype, 1, parts=(128,))
    options = {} if implementation == "xla" else dict(out_dtype="float32")
    *_, logits = check(rows, of_layer, implementation=implementation, **options)
    assert logits.dtype == np.float32


@pytest.mark.slow
def test_gradients_are_those_of_its_parts(implementation, dtype):
    rows, of_layer = arguments(dtype, 1)
    part = jax.tree.map(lambda its: its[LAYER], of_layer)
    dy = np.random.default_rng(1).standard_normal((1, sum(PARTS))).astype(np.float32)

    def loss(function, x, more, lora):
        options = dict(parts=PARTS, implementation=implementation)
        others = part | rows | dict(x=x, more=more, lora=lora)
        total, normed, y = function(**others, **options)
        return jnp.sum(y * dy) + jnp.sum(total * normed)

    some = rows["x"], rows["more"], part["lora"]
    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, function), argnums=(0, 1, 2)))(*some)
        for function in (together, parts_of_it)
    )
    for its, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.asarray(other).any()
        np.testing.assert_array_equal(np.asarray(its), np.asarray(other))


@pytest.mark.gpu
def test_on_hopper_it_is_one_kernel(dtype):
    if platform_implementation() != "mosaic_gpu":
        pytest.skip("not a Hopper GPU")
    rows, of_layer = arguments(dtype, 1)
    part = jax.tree.map(lambda its: its[LAYER], of_layer)
    text = jax.jit(functools.partial(together, parts=PARTS)).lower(**rows, **part).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
