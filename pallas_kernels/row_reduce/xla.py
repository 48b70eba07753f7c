"""Plain JAX: sums are products with ones, which go through the fixed tiles of `lora_matmul`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.apart import apart
from pallas_kernels.grouped_lora_matmul.api import lora_matmul

CHUNK = 1024  # features of a step of `log_sum_exp`


def row_sum(x):
    return lora_matmul(x, jnp.ones((1, x.shape[1]), x.dtype))


def row_dot(x, y):
    wide = jnp.promote_types(jnp.float32, jnp.promote_types(x.dtype, y.dtype))
    return row_sum(x.astype(wide) * y.astype(wide))


def scaled_and_dot(x, y, scale):
    dot = row_dot(x, y)
    return (x.astype(dot.dtype) * scale.astype(dot.dtype)).astype(y.dtype), dot


def rms_norm(x, weight, eps):
    wide = x.astype(jnp.float32)
    mean_square = row_sum(wide * wide) / x.shape[1]
    return (wide * lax.rsqrt(mean_square + eps)).astype(x.dtype) * weight


def norm_gradient(x, weight, dy, eps, more=None):
    wide, features = x.astype(jnp.float32), x.shape[1]
    inverse = lax.rsqrt(row_sum(wide * wide) / features + eps)
    normed = wide * inverse
    dnormed = apart((dy * weight).astype(jnp.float32))
    along = apart(normed * (row_sum(dnormed * normed) / features))
    dx = inverse * (dnormed - along)
    dx = dx.astype(x.dtype)
    return dx if more is None else more + dx


def add_norm(x, more, weight, eps):
    total = x + more
    return total, rms_norm(total, weight, eps)


def log_sum_exp(x):
    """A running maximum and sum over chunks in a fixed order."""
    rows, features = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -features % CHUNK)), constant_values=-jnp.inf)

    def chunk(i, carry):
        maximum, total = carry
        part = lax.dynamic_slice_in_dim(padded, i * CHUNK, CHUNK, axis=1)
        new_maximum = jnp.maximum(maximum, jnp.minimum(part.max(-1), largest))
        total = total * jnp.exp(maximum - new_maximum)
        below = apart(part - new_maximum[:, None])
        return new_maximum, total + row_sum(jnp.exp(below))[:, 0]

    # Finite, so that a chunk of -inf alone does not make the correction exp(-inf + inf), and that
    # an inf is one of its sum.
    largest = jnp.finfo(x.dtype).max
    lowest = jnp.full(rows, jnp.finfo(x.dtype).min, x.dtype)
    carry = (lowest, jnp.zeros(rows, x.dtype))
    maximum, total = lax.fori_loop(0, padded.shape[1] // CHUNK, chunk, carry)
    return maximum + jnp.log(total)
