"""An embedding's low-rank product over rank classes: the bits of one class, gradients too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from lora_moe_jax.layers.embedding_lora import columns, plus_rows, scalings
from pallas_kernels import Lora
from tests.pallas_kernels.class_cases import assert_same_products

VOCAB, HIDDEN, MOST = 11, 16, 4
CLASSES = (slice(0, 2), 2), (slice(2, 3), MOST)  # the slots of each, and their rank


def in_classes(pair: Lora):
    return tuple(
        Lora(pair.a[its, :, :rank], pair.b[its, :, :rank], pair.scaling[its])
        for its, rank in CLASSES
    )


@jax.jit
def values(lora, slots, row, y):
    """y, and its gradient with respect to a and b."""

    def total(lora):
        u = columns(lora, slots, row).astype(jnp.float32) * scalings(lora, slots)
        found = plus_rows(y, u, lora, slots)
        return jnp.sum(jnp.sin(found)), found

    (_, found), gradient = jax.value_and_grad(total, has_aux=True)(lora)
    return found, gradient


def test_classes_have_the_bits_of_one_class():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 1, MOST, n)).astype(np.float32) for n in (VOCAB, HIDDEN))
    for factor in (a, b):
        factor[:2, :, 2:] = 0
    pair = Lora(a, b, rng.uniform(1, 2, (3, 1)).astype(np.float32))
    slots, row = np.array([0, 2, -1, 1, 2, 0, 2]), np.array([3, 3, 3, 10, 0, 3, 0])
    y = rng.standard_normal((7, HIDDEN)).astype(np.float32)
    found, gradient = jax.tree.map(np.asarray, values(in_classes(pair), slots, row, y))
    expected, of_one = jax.tree.map(np.asarray, values(pair, slots, row, y))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[2], y[2])
    delta = np.einsum("tr,trh->th", a[slots, 0, :, row], b[slots, 0]) * pair.scaling[slots]
    np.testing.assert_allclose(found, y + np.where((slots >= 0)[:, None], delta, 0), rtol=1e-5)
    for its, other in zip(gradient, in_classes(of_one), strict=True):
        assert_same_products(its.a, other.a)
        assert_same_products(its.b, other.b)


def test_nan_in_a_class_stays_there():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 1, MOST, n)).astype(np.float32) for n in (VOCAB, HIDDEN))
    pair = Lora(a, b, np.ones((3, 1), np.float32))
    slots, row = np.array([0, 2, -1, 1]), np.array([3, 3, 3, 10])
    y = np.zeros((4, HIDDEN), np.float32)
    sound, broken = in_classes(pair)
    expected, gradient = jax.tree.map(np.asarray, values((sound, broken), slots, row, y))
    broken = Lora(*(np.full_like(array, np.nan) for array in broken))
    found, of_broken = jax.tree.map(np.asarray, values((sound, broken), slots, row, y))
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[slots != 2], expected[slots != 2])
    np.testing.assert_array_equal(of_broken[0].a, gradient[0].a)
    np.testing.assert_array_equal(of_broken[0].b, gradient[0].b)
