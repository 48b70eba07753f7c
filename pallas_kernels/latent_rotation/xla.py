"""Plain JAX, one operation after the other."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.head_rotation.xla import rotate
from pallas_kernels.paged_attention.api import write_pages
from pallas_kernels.row_reduce.api import rms_norm


def rotate_and_cache_latents(sizes, q, kv, weight, cos, sin, latent_pages, rope_pages, view):
    q = q[:, sizes.q_first : sizes.q_first + sizes.heads * sizes.head]
    kv = kv[:, sizes.kv_first : sizes.kv_first + sizes.latent + sizes.rope]
    q_nope, q_rope = jnp.split(q.reshape(-1, sizes.heads, sizes.head), [sizes.nope], axis=2)
    latent, k_rope = jnp.split(kv, [sizes.latent], axis=1)
    missing = rope_pages.shape[-1] - sizes.rope

    def rotated(x):
        x = rotate(x, cos, sin, sizes.interleaved)
        return jnp.pad(x, ((0, 0), (0, 0), (0, missing))) if missing else x

    return (
        q_nope,
        rotated(q_rope),
        write_pages(latent_pages, rms_norm(latent, weight, sizes.eps), view),
        write_pages(rope_pages, rotated(k_rope[:, None])[:, 0], view),
    )
