"""Causal attention of a flat batch of tokens over paged caches, for grouped heads and for latents.

Letters: T tokens of the batch, B requests, P pages, H query heads, G key/value heads, D head width,
C latent width, E rotary width. A request's position p lives in page `page_tables[b, p // page]`.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import (
    check_known,
    implementation_module,
    platform_implementation,
    serves,
)
from pallas_kernels.paged_attention import differentiable, xla
from pallas_kernels.paged_attention.check import check_grouped, check_latent, check_view

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_tpu")


class PageView(NamedTuple):
    """Which positions of which request the batch's tokens are.

    Attributes:
      request: the request of each token, a row of `page_tables`; -1, and nothing else, for padding
        tokens.
      positions: the position of each token in its request, from 0 on, within its page table; of
        padding tokens anything.
      page_tables: the pages of each request, in position order; unused entries are never read.
    """

    request: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    page_tables: Int[Array, "requests pages_per_request"]


def write_pages(
    pages: Float[Array, "pages page_size *features"],
    values: Float[Array, "tokens *features"],
    view: PageView,
) -> Float[Array, "pages page_size *features"]:
    """Stores each token's values at its position.

    Padding tokens, and what is outside of the page tables, write nothing. Differentiable.

    Raises:
      ValueError: values that are not those of a page's place for each token, or a view that is not
        of as many tokens.
    """
    tokens = view.request.shape[0]
    if values.shape != (tokens, *pages.shape[2:]):
        raise ValueError(f"values must be {[tokens, *pages.shape[2:]]}, got {values.shape}")
    check_view(view, tokens)
    return differentiable.write_pages(*of_jax((pages, values)), in_32_bits(view))


def paged_attention(
    q: Float[Array, "tokens heads width"],
    k_pages: Float[Array, "pages page_size kv_heads width"],
    v_pages: Float[Array, "pages page_size kv_heads v_width"],
    view: PageView,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens heads v_width"]:
    """Each token attends to positions 0..its own of its request (the last `sliding_window` only).

    Query head h reads key/value head h // (H / G). Softmax in float32. The cache must already
    hold the batch's own tokens. Padding tokens get zeros.

    Exactness: keys are taken in blocks of a fixed size in position order, so a token's bits depend
    on its own request alone, not on the batch, the chunk it came in, or the page numbers.
    Isolation: whatever other requests' positions hold, and those that no token of the batch sees,
    is selected away; of the request's own later positions, all that is finite.

    Differentiable with respect to q and the pages where the batch holds whole sequences, positions
    from 0 on: training. The gradient has the same exactness and isolation. With "mosaic_gpu" it is
    kernels for bfloat16 heads of 64 or 128 columns (192 of queries and keys); otherwise plain JAX,
    whatever the implementation, whose bits on a GPU depend on how many tokens there are.

    Args:
      sinks: a logit of each head that is one more score of each of its tokens, and adds no value
        (gpt-oss); as it is, not scaled. It has no gradient.
      implementation: "xla", "mosaic_gpu" (Hopper) or "mosaic_tpu" (which has run in the interpreter
        alone). None: what the platform has where it serves widths, heads and pages, else "xla".
        Their bits differ.

    Raises:
      ValueError: arrays that do not belong together, or are of another type; a window below 1.
      NotImplementedError: an implementation that cannot serve these shapes.
    """
    check_grouped(q, k_pages, v_pages, view, sliding_window, sinks)
    backend = _choose_backend(implementation, "check_grouped", q, k_pages, v_pages, view, sinks)
    arguments = *of_jax((q, k_pages, v_pages)), in_32_bits(view), of_jax(sinks)
    return differentiable.paged_attention(backend, float(scale), sliding_window, *arguments)


def paged_latent_attention(
    q_latent: Float[Array, "tokens heads latent"],
    q_rope: Float[Array, "tokens heads rope"],
    latent_pages: Float[Array, "pages page_size latent"],
    rope_pages: Float[Array, "pages page_size rope"],
    view: PageView,
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "tokens heads latent"]:
    """Absorbed multi-head latent attention: scores and values both come from the cached latent.

    score = (q_latent · latent + q_rope · rope) · scale; the result is the attention-weighted
    latent of each head. Same contract as `paged_attention`; the gradient is plain JAX. That of
    `latent_attention`, which knows what makes heads of latents, multiplies fewer columns.
    """
    arrays = q_latent, q_rope, latent_pages, rope_pages
    check_latent(*arrays, view)
    backend = _choose_backend(implementation, "check_latent", *arrays, view)
    arguments = *of_jax(arrays), in_32_bits(view)
    return differentiable.paged_latent_attention(backend, float(scale), *arguments)


def of_jax(arrays):
    """NumPy's arrays as JAX's: these take JAX's numbers as indices."""
    return jax.tree.map(
        lambda its: jnp.asarray(its) if isinstance(its, np.ndarray) else its, arrays
    )


def in_32_bits(view: PageView) -> PageView:
    """Narrower numbers need not hold a place in the cache, and of wider ones there are none."""
    return PageView(*(jnp.asarray(its, jnp.int32) for its in view))


def _choose_backend(implementation: str | None, check: str, *arguments) -> ModuleType:
    """The module that serves these shapes; one that is asked for by name checks them."""
    check_known(implementation, IMPLEMENTATIONS)
    name = implementation or platform_implementation()
    if name == "xla":
        return xla
    backend = implementation_module("pallas_kernels.paged_attention", name)
    if implementation is None and not serves(getattr(backend, check), *arguments):
        return xla
    return backend
