"""Plain JAX, one operation after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.api import write_pages
from pallas_kernels.row_reduce.api import rms_norm


def rotate_and_cache(heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, eps):
    kv_heads = k_pages.shape[2]
    q, k, v = jnp.split(heads, [heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads], axis=1)
    q, k = (
        rotate(its if weight is None else rms_norm(its, weight, eps), cos, sin)
        for its, weight in ((q, q_weight), (k, k_weight))
    )
    return q, write_pages(k_pages, k, view), write_pages(v_pages, v, view)


def head_gradients(heads, q_weight, k_weight, cos, sin, dq, dk_pages, dv_pages, view, eps):
    def of_heads(heads):
        pages = map(jnp.zeros_like, (dk_pages, dv_pages))
        return rotate_and_cache(heads, q_weight, k_weight, cos, sin, *pages, view, eps)

    (dheads,) = jax.vjp(of_heads, heads)[1]((dq, dk_pages, dv_pages))
    return dheads


def rotate(x, cos, sin, interleaved=False):
    cos, sin, wide = cos[:, None], sin[:, None], x.astype(jnp.float32)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    # Of two products that are added, the compiler may fuse either with the addition, and rounds
    # differently. Behind the barrier one of them is a finished number.
    first_sin, second_sin = lax.optimization_barrier((first * sin, second * sin))
    rotated = jnp.concatenate([first * cos - second_sin, second * cos + first_sin], axis=-1)
    return rotated.astype(x.dtype)
