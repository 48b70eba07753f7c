"""What latent attention does before it attends: norm and cache latents, rotate, cache rotary keys.

Letters: T tokens, H heads, N columns of their queries that are not rotated, E rotated ones, C of
latents, P pages.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from pallas_kernels.head_rotation.api import check_angles
from pallas_kernels.implementation import check_known, implementation_module
from pallas_kernels.latent_rotation import differentiable, xla
from pallas_kernels.paged_attention.api import PageView, in_32_bits
from pallas_kernels.paged_attention.check import check_view

IMPLEMENTATIONS = ("xla", "triton")


class ColumnsOf(NamedTuple):
    """Columns of an array from the first on, without a copy of them."""

    array: Float[Array, "tokens columns"]
    first: int = 0


def rotate_and_cache_latents(
    q: ColumnsOf,
    kv: ColumnsOf,
    weight: Float[Array, " latent"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    latent_pages: Float[Array, "pages page_size latent"],
    rope_pages: Float[Array, "pages page_size rope"],
    view: PageView,
    *,
    heads: int,
    nope: int,
    eps: float,
    interleaved: bool,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries, the rotated part apart, and the pages with normed latents and rotated keys.

    Differentiable with respect to q, kv, weight and pages, not to angles.

    Args:
      q: of each token, the N + E columns of every head. kv: its latent, and the E of its rotary
        key. Both may be parts of one array.
      weight: of the latents' RMS norm, see `rms_norm`; a `Layered` one has no gradient.
      cos, sin: float32, of the angle of each of the E / 2 pairs of columns.
      rope_pages: may be wider than E: zeros are after the keys, and after the queries' part.
      heads, nope: H and N.
      interleaved: pairs are columns (2j, 2j + 1), and come out as (j, j + E / 2); else they are
        that before, too.
      implementation: "xla" or "triton" (GPUs, pages of E columns); None takes what serves the
        platform and the shapes best. Their bits differ; a token's depend on that token alone.

    Returns:
      q_nope [T, H, N], q_rope [T, H, columns of rope_pages], latent_pages, rope_pages. Padding
      tokens, and positions past the page table, are not cached.

    Raises:
      ValueError: shapes that do not belong together.
      NotImplementedError: an implementation that does not exist or cannot serve these shapes.
    """
    latent, half = latent_pages.shape[-1], cos.shape[-1]
    check_angles(q.array.shape[0], 2 * half, cos, sin)
    check_view(view, q.array.shape[0])
    _check_columns("q", q, heads * (nope + 2 * half))
    _check_columns("kv", kv, latent + 2 * half)
    if rope_pages.shape[-1] < 2 * half:
        raise ValueError(f"rope_pages must have {2 * half} columns, got {rope_pages.shape}")
    sizes = Sizes(q.first, kv.first, heads, nope, latent, half, interleaved, float(eps))
    backend = _backend(implementation, sizes, rope_pages)
    arrays = q.array, kv.array, weight.astype(kv.array.dtype), cos, sin, latent_pages, rope_pages
    return differentiable.rotate_and_cache_latents(backend, sizes, *arrays, in_32_bits(view))


def _check_columns(name: str, of: ColumnsOf, count: int) -> None:
    array, first = of
    if array.ndim != 2 or first < 0 or first + count > array.shape[1]:
        raise ValueError(
            f"{name} must have {count} columns from the first, {first}, on, got {array.shape}"
        )


class Sizes(NamedTuple):
    """What is static: first columns of q and of kv, H, N, C, E / 2, and how pairs lie."""

    q_first: int
    kv_first: int
    heads: int
    nope: int
    latent: int
    half: int
    interleaved: bool
    eps: float

    @property
    def rope(self) -> int:
        return 2 * self.half

    @property
    def head(self) -> int:
        return self.nope + self.rope


def _backend(implementation: str | None, sizes: Sizes, rope_pages) -> ModuleType:
    check_known(implementation, IMPLEMENTATIONS)
    if implementation == "xla" or (implementation is None and jax.default_backend() != "gpu"):
        return xla
    if rope_pages.shape[-1] != sizes.rope:
        if implementation is not None:
            raise NotImplementedError(f"triton: pages must have E columns ({rope_pages.shape=})")
        return xla
    return implementation_module("pallas_kernels.latent_rotation", "triton")
