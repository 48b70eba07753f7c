"""The benchmarks' inputs: random, of the right scale, never zero."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax.bench import arrays
from pallas_kernels.shapes import ProductShape

SHAPE = ProductShape("small", 3, 64, 32, (16, 16))


@pytest.mark.parametrize("shape", [(64, 32), (3, 64, 32)])
def test_normal(shape):
    values = np.asarray(arrays.normal(0, *shape, scale=0.5, dtype=jnp.float32))
    assert values.shape == shape and values.dtype == np.float32
    assert values.std() == pytest.approx(0.5, rel=0.1)
    assert len(np.unique(values)) > 0.99 * values.size  # matrices differ too
    assert not np.array_equal(values, arrays.normal(1, *shape, scale=0.5, dtype=jnp.float32))


def test_weights_and_adapters():
    assert arrays.weights(0, SHAPE).shape == (3, 32, 64)
    first, second = arrays.adapters(0, SHAPE, 2, 4, shared_a=True)
    assert first.a.shape == second.a.shape == (2, 1, 4, 64)
    assert first.b.shape == second.b.shape == (2, 3, 4, 16)
    assert first.a.dtype == jnp.bfloat16 and not np.array_equal(first.a, second.a)
