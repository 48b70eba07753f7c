"""Rounding that stays where a value is widened again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lora_matmul
from pallas_kernels.rounded import added, rounded

VALUES = np.float32([0.0, -0.0, 1.00390625, -3.1415927, 1e-40, 3.4e38, np.inf, -np.inf, np.nan])


def test_values():
    found = jax.jit(lambda values: rounded(values, jnp.bfloat16).astype(jnp.float32))(VALUES)
    expected = VALUES.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(found)[:4], expected[:4])
    np.testing.assert_array_equal(np.asarray(found)[5:], expected[5:])
    assert rounded(jnp.asarray(VALUES), jnp.float32).dtype == jnp.float32


def test_sums():
    x, y = jnp.asarray([1.0, 256.0], jnp.bfloat16), jnp.asarray([2.0**-9, 1.0], jnp.bfloat16)
    assert added(x, y).tolist() == [1.0, 256.0]
    assert added(x.astype(jnp.float32), y.astype(jnp.float32)).tolist() == [1 + 2**-9, 257.0]


@pytest.mark.parametrize("dtype, roundings", [("bfloat16", 1), ("float32", 0)])
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_products_round(implementation, dtype, roundings):
    x, w = jnp.ones((3, 48), dtype), jnp.ones((20, 48), dtype)

    def product(x, w):
        return lora_matmul(x, w, jnp.full(3, -1), (None,), implementation=implementation)

    assert str(jax.make_jaxpr(product)(x, w)).count("reduce_precision[") == roundings
