"""What does not belong together in a call of paged attention, told by name."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.floats import check_floats


def check_grouped(q, k_pages, v_pages, view, sliding_window, sinks) -> None:
    """Raises ValueError unless these are arguments of `paged_attention`."""
    check_floats(dict(q=q, k_pages=k_pages, v_pages=v_pages))
    if q.ndim != 3 or k_pages.ndim != 4 or v_pages.ndim != 4:
        raise ValueError(
            "q must be [tokens, heads, width], k_pages and v_pages [pages, page_size, kv_heads, "
            f"width], got {q.shape}, {k_pages.shape} and {v_pages.shape}"
        )
    _, heads, width = q.shape
    _check_types(q, dict(k_pages=k_pages, v_pages=v_pages))
    if k_pages.shape[3] != width or v_pages.shape[:3] != k_pages.shape[:3]:
        raise ValueError(
            f"k_pages must end with q's width, {width}, and v_pages have the same pages and heads, "
            f"got {k_pages.shape} and {v_pages.shape}"
        )
    if heads % k_pages.shape[2]:
        raise ValueError(
            f"{heads} heads of q are no whole number for each of {k_pages.shape[2]} kv_heads"
        )
    if sliding_window is not None and operator.index(sliding_window) < 1:
        raise ValueError(f"sliding_window must be None or at least 1, got {sliding_window}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be one for each of {heads} heads, got {sinks.shape}")
    check_view(view, q.shape[0])


def check_latent(q_latent, q_rope, latent_pages, rope_pages, view) -> None:
    """Raises ValueError unless these are arguments of `paged_latent_attention`."""
    arrays = dict(
        q_latent=q_latent, q_rope=q_rope, latent_pages=latent_pages, rope_pages=rope_pages
    )
    check_floats(arrays)
    for queries, pages in (("q_latent", "latent_pages"), ("q_rope", "rope_pages")):
        q, cache = arrays[queries], arrays[pages]
        if q.ndim != 3 or cache.ndim != 3 or q.shape[2] != cache.shape[2]:
            raise ValueError(
                f"{queries} must be [tokens, heads, width] and {pages} [pages, page_size, width], "
                f"got {q.shape} and {cache.shape}"
            )
    if q_latent.shape[:2] != q_rope.shape[:2] or latent_pages.shape[:2] != rope_pages.shape[:2]:
        shapes = ", ".join(f"{name} {its.shape}" for name, its in arrays.items())
        raise ValueError(f"tokens and heads, and pages and their size, must be the same: {shapes}")
    _check_types(q_latent, arrays)
    check_view(view, q_latent.shape[0])


def _check_types(q, arrays: Mapping[str, jax.Array]) -> None:
    """Raises ValueError for what is empty, or for 64 bits beside fewer."""
    for name, array in arrays.items():
        if 0 in array.shape[1:] or (name.endswith("pages") and not array.size):
            raise ValueError(f"{name} must not be empty, got {array.shape}")
        if (array.dtype == jnp.float64) != (q.dtype == jnp.float64):
            raise ValueError(f"{name} are {array.dtype}, and queries {q.dtype}")


def check_view(view, tokens: int) -> None:
    """Raises ValueError unless a view is of as many tokens."""
    for name in ("request", "positions"):
        array = getattr(view, name)
        if array.shape != (tokens,) or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"view.{name} must be integers [{tokens}], got {array.dtype}{list(array.shape)}"
            )
    tables = view.page_tables
    if tables.ndim != 2 or not tables.size or not jnp.issubdtype(tables.dtype, jnp.integer):
        raise ValueError(
            "view.page_tables must be integers [requests, pages_per_request], with a page, "
            f"got {tables.dtype}{list(tables.shape)}"
        )
