"""Paged attention on TPUs: the Pallas kernel, and what it cannot serve."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.grouped_lora_matmul.tpu_schedule import current_device
from pallas_kernels.paged_attention import tpu_sizes
from pallas_kernels.paged_attention.tpu_attention import attention_kernel

DTYPES = (jnp.bfloat16, jnp.float32)


def check_grouped(q, k_pages, v_pages, view, sinks):
    """Raises NotImplementedError for widths, heads and pages that the kernel cannot serve.

    Not for more tokens or requests than scalar memory has room for: what serves a model must not
    differ from step to step, or its bits would.
    """
    del sinks  # any
    _check_arrays(q=q, k_pages=k_pages, v_pages=v_pages)
    device = current_device()
    tpu_sizes.grouped_sizes(q, k_pages, v_pages, view, 1.0, None, device).check()


def check_latent(q_latent, q_rope, latent_pages, rope_pages, view):
    """See `check_grouped`."""
    _check_arrays(
        q_latent=q_latent, q_rope=q_rope, latent_pages=latent_pages, rope_pages=rope_pages
    )
    device = current_device()
    tpu_sizes.latent_sizes(q_latent, latent_pages, rope_pages, view, 1.0, device).check()


def paged_attention(q, k_pages, v_pages, view, scale, sliding_window, sinks):
    """See `api.paged_attention`."""
    check_grouped(q, k_pages, v_pages, view, sinks)
    device = current_device()
    sizes = tpu_sizes.grouped_sizes(q, k_pages, v_pages, view, scale, sliding_window, device)
    sizes.check_tables()
    caches = k_pages, v_pages
    if sizes.kv_heads == 1:
        caches = tuple(pages[:, :, 0] for pages in caches)
    return attention_kernel(sizes, (q,), caches, view, device, sinks)


def paged_latent_attention(q_latent, q_rope, latent_pages, rope_pages, view, scale):
    """See `api.paged_latent_attention`."""
    check_latent(q_latent, q_rope, latent_pages, rope_pages, view)
    device = current_device()
    sizes = tpu_sizes.latent_sizes(q_latent, latent_pages, rope_pages, view, scale, device)
    sizes.check_tables()
    return attention_kernel(sizes, (q_latent, q_rope), (latent_pages, rope_pages), view, device)


def _check_arrays(**arrays):
    dtypes = {array.dtype for array in arrays.values()}
    if len(dtypes) > 1 or not dtypes.issubset({jnp.dtype(dtype) for dtype in DTYPES}):
        shapes = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in arrays.items())
        raise NotImplementedError(
            f"mosaic_tpu: queries and caches must be all bfloat16 or all float32 ({shapes})"
        )
