"""The biases of the experts that a token went to, weighted as their outputs are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import row_sum
from pallas_kernels.apart import apart


def bias_of_choices(
    bias: Float[Array, "experts hidden"],
    experts: Int[Array, "tokens choices"],
    weights: Float[Array, "tokens choices"],
) -> Float[Array, "tokens hidden"]:
    """Σ_k weights[t, k] · bias[experts[t, k]] in float32, the choices one after the other."""
    terms = (
        apart(_weighted(weights[:, choice].astype(jnp.float32), bias[experts[:, choice]]))
        for choice in range(experts.shape[1])
    )
    return sum(terms, start=jnp.float32(0))


@jax.custom_vjp
def _weighted(weights, rows):
    """weights [T] times rows [T, H]; the gradient of the weights has one order of its sums."""
    return weights[:, None] * rows.astype(jnp.float32)


def _forward(weights, rows):
    return _weighted(weights, rows), rows


def _backward(rows, dy):
    return row_sum(dy * rows.astype(jnp.float32))[:, 0], None


_weighted.defvjp(_forward, _backward)
