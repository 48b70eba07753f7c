"""Paged attention on Hopper GPUs: the Mosaic kernel, and what it cannot serve."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.paged_attention import gpu_sizes
from pallas_kernels.paged_attention.gpu_attention import attention_kernel
from pallas_kernels.paged_attention.gpu_gradients import attention_gradients
from pallas_kernels.paged_attention.gpu_sizes import (
    BLOCK,
    LINE,
    LINES_OF_CONSUMER,
    MIN_STAGES,
    ROWS,
    Sizes,
)

__all__ = [
    "attention_gradients",
    "check_grouped",
    "check_latent",
    "paged_attention",
    "paged_latent_attention",
]

MIN_PAGE = 8  # positions: the tensor core's unit
MAX_VALUE_LINES = 2 * LINES_OF_CONSUMER  # of two warpgroups


def check_grouped(q, k_pages, v_pages, view, sinks):
    """Raises NotImplementedError if the kernel cannot serve these shapes."""
    del view  # any tables
    _check_arrays(q=q, k_pages=k_pages, v_pages=v_pages)
    _check_sizes(gpu_sizes.grouped_sizes(q, k_pages, v_pages, 1.0, None, sinks is not None))


def check_latent(q_latent, q_rope, latent_pages, rope_pages, view):
    """Raises NotImplementedError if the kernel cannot serve these shapes."""
    del view  # any tables
    _check_arrays(
        q_latent=q_latent, q_rope=q_rope, latent_pages=latent_pages, rope_pages=rope_pages
    )
    _check_sizes(gpu_sizes.latent_sizes(q_latent, latent_pages, rope_pages, 1.0))


def paged_attention(q, k_pages, v_pages, view, scale, sliding_window, sinks):
    """See `api.paged_attention`."""
    check_grouped(q, k_pages, v_pages, view, sinks)
    static = scale, sliding_window, sinks is not None
    sizes = gpu_sizes.grouped_sizes(q, k_pages, v_pages, *static)
    return attention_kernel(sizes, q, (k_pages, v_pages), view, sinks)


def paged_latent_attention(q_latent, q_rope, latent_pages, rope_pages, view, scale):
    """See `api.paged_latent_attention`."""
    check_latent(q_latent, q_rope, latent_pages, rope_pages, view)
    sizes = gpu_sizes.latent_sizes(q_latent, latent_pages, rope_pages, scale)
    q = jnp.concatenate([q_latent, q_rope], axis=2)
    return attention_kernel(sizes, q, (latent_pages[:, :, None], rope_pages[:, :, None]), view)


def _check_arrays(**arrays):
    shapes = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in arrays.items())
    if any(array.dtype != jnp.bfloat16 for array in arrays.values()):
        raise NotImplementedError(f"mosaic_gpu: queries and caches must be bfloat16 ({shapes})")
    if any(array.shape[-1] % LINE for array in arrays.values()):
        raise NotImplementedError(f"mosaic_gpu: widths must be multiples of {LINE} ({shapes})")


def _check_sizes(sizes: Sizes):
    def refuse(why: str):
        raise NotImplementedError(f"mosaic_gpu: {why} ({sizes})")

    if sizes.tokens == 0:
        refuse("there must be at least one token")
    if sizes.page % MIN_PAGE or (BLOCK % sizes.page and sizes.page % BLOCK):
        refuse(f"pages must have {MIN_PAGE}, 16, 32 or a multiple of {BLOCK} positions")
    if sizes.heads // sizes.kv_heads > ROWS and sizes.heads % (sizes.kv_heads * ROWS):
        refuse(f"more than {ROWS} query heads of a key/value head must be a multiple of {ROWS}")
    if sizes.value_lines > MAX_VALUE_LINES or sizes.value_lines % sizes.consumers:
        refuse(
            f"values must have at most {MAX_VALUE_LINES * LINE} columns, an even number of {LINE}s"
        )
    if sizes.value_cache > 0 and sizes.consumers > 1:
        refuse(f"values apart from their keys must have at most {LINES_OF_CONSUMER * LINE} columns")
    if sizes.stages < MIN_STAGES:
        refuse("two blocks of keys and values do not fit into shared memory")
