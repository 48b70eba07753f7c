"""A dense layer of few rows: on Hopper its shrink is in the kernel of its product, whose programs
make u, some for all, or of few features each for its own tile."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Lora, grouped_lora_matmul

SLOTS = np.array([2, -1, 0, 1, 1, 0, 2, -1])
K, RANK = 320, 5
LAYERS = {"wide": (1024, 512), "narrow": (64,)}
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

        with nothing_kept():
            traced = function.__wrapped__(implementation, layer).trace(
                x, w, SLOTS.astype(np.int32), lora
            )
        text = str(traced.jaxpr)
        assert "lora_shrink" not in text
        assert {"wide": "_beside_k", "narrow": "_shrink_k"}[layer] in text
    found = run(implementation, layer, slice(None), lora).view(jnp.bfloat16).astype(np.float64)
    expected = definition(layer)
    assert np.abs(found - expected).max() <= 2**-7 * np.abs(expected).max()


@every_layer
def test_bits_of_rows_alone_and_in_another_order(implementation, layer):
    lora = arguments(layer)[2]
    together = run(implementation, layer, slice(None), lora)
    order = np.random.default_rng(1).permutation(len(SLOTS))
    assert np.array_equal(run(implementation, layer, order, lora), together[order])
    for row in (0, 1, 3):
        assert np.array_equal(run(implementation, layer, [row], lora), together[[row]])


@every_layer
@pytest.mark.parametrize("field", ["a", "b", "scaling"])
def test_a_poisoned_slot_stays_alone(implementation, layer, field):
    lora = arguments(layer)[2]

    def poisoned(pair):
        array = np.array(getattr(pair, field))
        array[1] = np.nan
        return pair._replace(**{field: array})

    together = run(implementation, layer, slice(None), lora)
    found = run(implementation, layer, slice(None), tuple(map(poisoned, lora)))
    others = SLOTS != 1
    assert np.array_equal(found[others], together[others])
    assert np.isnan(found[~others].view(jnp.bfloat16).astype(np.float32)).any()
