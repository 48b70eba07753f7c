"""`rotated_attention`: what a grouped attention does with its heads, from their product on.

The definition is that of its parts, `rotate_and_cache` and `paged_attention`; of few tokens a
platform may have one kernel for both, with the same bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from pallas_kernels.head_rotation.api import check_heads, rotate_and_cache
from pallas_kernels.implementation import (
    implementation_module,
    platform_implementation,
    serves,
)
from pallas_kernels.one_kernel import kernel_or_parts
from pallas_kernels.paged_attention.api import PageView, in_32_bits, paged_attention
from pallas_kernels.paged_attention.check import check_view


class _Static(NamedTuple):
    """What is no array."""

    eps: float
    scale: float
    sliding_window: int | None
    implementation: str | None


def rotated_attention(
    heads: Float[Array, "tokens all_heads width"],
    q_weight: Float[Array, " width"] | None,
    k_weight: Float[Array, " width"] | None,
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    k_pages: Float[Array, "pages page_size kv_heads width"],
    v_pages: Float[Array, "pages page_size kv_heads width"],
    view: PageView,
    *,
    eps: float,
    scale: float,
    sliding_window: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norms and rotates heads, stores keys and values in their pages, and attends.

    Args:
      heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, eps: see `rotate_and_cache`.
      scale, sliding_window, sinks: see `paged_attention`.
      implementation: of the attention; heads are rotated by what serves the platform best.

    Returns:
      `[T, H, D]` of `paged_attention`, k_pages, v_pages.

    Raises:
      ValueError, NotImplementedError: see both.
    """
    check_heads(heads, cos, sin, k_pages, v_pages)
    check_view(view, heads.shape[0])
    view = in_32_bits(view)
    static = _Static(float(eps), float(scale), sliding_window, implementation)
    apart = functools.partial(_apart, static)
    arguments = heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, sinks
    kernels = _kernels(static, heads, k_pages, v_pages, view, sinks)
    if kernels is None or (q_weight is None) != (k_weight is None):
        return apart(*arguments)
    return kernel_or_parts(functools.partial(_in_one_kernel, kernels, static), apart, *arguments)


def _kernels(static: _Static, heads, k_pages, v_pages, view, sinks):
    """The module that has one kernel for both; None if no module has."""
    if static.sliding_window is not None or sinks is not None:
        return None
    if (static.implementation or platform_implementation()) != "mosaic_gpu":
        return None
    kernels = implementation_module("pallas_kernels.rotated_attention", "mosaic_gpu")
    return kernels if serves(kernels.check, heads, k_pages, v_pages, view) else None


def _apart(static: _Static, heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, sinks):
    q, k_pages, v_pages = rotate_and_cache(
        heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, eps=static.eps
    )
    out = paged_attention(
        q,
        k_pages,
        v_pages,
        view,
        scale=static.scale,
        sliding_window=static.sliding_window,
        sinks=sinks,
        implementation=static.implementation,
    )
    return out, k_pages, v_pages


def _in_one_kernel(kernels, static: _Static, *arguments):
    *arrays, _ = arguments
    return kernels.rotated_attention(*arrays, static.eps, static.scale)
