"""A dense layer of few rows: on Hopper its shrink is in the kernel of its product, whose programs
make u, some for all, or of few features each for its own tile."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Lora, grouped_lora_matmul

SLOTS = np.array([2, -1, 0, 1, 1, 0, 2, 2, 1, 0, -1])
K, RANK = 320, 5
LAYERS = {"wide": (1024, 512), "narrow": (64,)}
FEWEST = 8  # rows, each of which is a tile of the narrow layer
KERNELS_OF_FEWEST = {"wide": "_beside_k", "narrow": "_shrink_k"}
every_layer = pytest.mark.parametrize("layer", LAYERS)


@functools.cache
def arguments(layer):
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(jnp.bfloat16)

    widths = LAYERS[layer]
    x, w = normal(len(SLOTS), K), normal(1, sum(widths), K, scale=K**-0.5)
    lora = tuple(
        Lora(
            normal(3, 1, RANK, K, scale=K**-0.5),
            normal(3, 1, RANK, width),
            rng.standard_normal((3, 1)).astype(np.float32),
        )
        for width in widths
    )
    return x, w, lora


@functools.cache
def function(implementation, layer):
    def run(x, w, slots, lora):
        options = dict(parts=LAYERS[layer], implementation=implementation)
        return grouped_lora_matmul(x, w, None, slots, lora, **options)

    return jax.jit(run)


def run(implementation, layer, rows, lora):
    x, w, _ = arguments(layer)
    y = function(implementation, layer)(x[rows], w, SLOTS[rows].astype(np.int32), lora)
    return np.asarray(y.view(jnp.uint16))


def definition(layer):
    x, w, lora = jax.tree.map(lambda its: np.asarray(its, np.float64), arguments(layer))
    y = x @ w[0].T
    for row in np.flatnonzero(SLOTS >= 0):
        slot = SLOTS[row]
        u = [its.scaling[slot, 0] * (its.a[slot, 0] @ x[row]) for its in lora]
        u = [its.astype(jnp.bfloat16).astype(np.float64) for its in u]
        y[row] += np.concatenate([its @ pair.b[slot, 0] for its, pair in zip(u, lora, strict=True)])
    return y


@every_layer
def test_equals_the_definition(implementation, layer):
    x, w, lora = arguments(layer)
    if implementation == "mosaic_gpu":
        from pallas_kernels.hopper.kept_kernel import nothing_kept  # JAX 0.11

        for rows, kernel in ((len(SLOTS), "_beside_k"), (FEWEST, KERNELS_OF_FEWEST[layer])):
            operands = x[:rows], w, SLOTS[:rows].astype(np.int32), lora
            with nothing_kept():
                traced = function.__wrapped__(implementation, layer).trace(*operands)
            text = str(traced.jaxpr)
            assert kernel in text and "lora_shrink" not in text
    expected = definition(layer)
    for rows in (len(SLOTS), FEWEST):
        found = run(implementation, layer, slice(rows), lora).view(jnp.bfloat16)
        error = np.abs(found.astype(np.float64) - expected[:rows]).max()
        assert error <= 2**-7 * np.abs(expected).max()


@every_layer
def test_bits_of_rows_alone_and_in_another_order(implementation, layer):
    lora = arguments(layer)[2]
    together = run(implementation, layer, slice(None), lora)
    order = np.random.default_rng(1).permutation(len(SLOTS))
    assert np.array_equal(run(implementation, layer, order, lora), together[order])
    for rows in ([0], [1], [3], [*range(FEWEST)]):
        assert np.array_equal(run(implementation, layer, rows, lora), together[rows])


@every_layer
@pytest.mark.parametrize("field", ["a", "b", "scaling"])
def test_a_poisoned_slot_stays_alone(implementation, layer, field):
    lora = arguments(layer)[2]

    def poisoned(pair):
        array = np.array(getattr(pair, field))
        array[1] = np.nan
        return pair._replace(**{field: array})

    for rows in (slice(None), slice(FEWEST)):
        together = run(implementation, layer, rows, lora)
        found = run(implementation, layer, rows, tuple(map(poisoned, lora)))
        others = SLOTS[rows] != 1
        assert np.array_equal(found[others], together[others])
        assert np.isnan(found[~others].view(jnp.bfloat16).astype(np.float32)).any()
