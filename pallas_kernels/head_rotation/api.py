"""What a grouped attention does with its heads before it attends: norm, rotate, cache.

Letters: T tokens, H query heads, G key/value heads, D head width, P pages.
"""

from __future__ import annotations

from types import ModuleType

import jax
from jaxtyping import Array, Float

from pallas_kernels.head_rotation import differentiable, xla
from pallas_kernels.implementation import check_known, implementation_module, mosaic_gpu_module
from pallas_kernels.paged_attention.api import PageView

IMPLEMENTATIONS = ("xla", "triton", "mosaic_gpu")


def rotate_and_cache(
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
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normed and rotated queries, and the pages with normed, rotated keys and with values.

    Without weights nothing is normed.

    Differentiable with respect to heads, weights and pages, not to angles.

    Args:
      heads: of each token H query heads, G key heads and G value heads.
      q_weight, k_weight: of the RMS norm over each head, see `rms_norm`; a `Layered` one has no
        gradient. Both or none.
      cos, sin: float32, of the angle of each pair of features (j, j + D / 2).
      implementation: "xla", "triton" (GPUs, D a power of two) or "mosaic_gpu" (Hopper, up to 64
        heads in all, of bfloat16 and D = 128; the gradient is Triton's); None takes what serves the
        platform and the shapes best. Their bits differ; a token's depend on that token alone.

    Returns:
      q [T, H, D], k_pages, v_pages. Padding tokens, and positions past the page table, are not
      cached.

    Raises:
      ValueError: one weight without the other.
      NotImplementedError: an implementation that does not exist or cannot serve these shapes.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight: queries and keys are normed, or neither are")
    return differentiable.rotate_and_cache(
        _backend(implementation, heads, k_pages, v_pages), eps,
        heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view,
    )  # fmt: skip


def rotate(
    x: Float[Array, "tokens heads width"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "tokens heads width"]:
    """Rotates each pair of features (j, j + width / 2) in float32.

    Interleaved pairs (2j, 2j + 1) come out de-interleaved, as DeepSeek-V3 writes them; scores do
    not depend on the order as queries and keys share it.
    """
    return xla.rotate(x, cos, sin, interleaved)


def _backend(implementation: str | None, heads, k_pages, v_pages) -> ModuleType:
    check_known(implementation, IMPLEMENTATIONS)
    if implementation == "xla" or (implementation is None and jax.default_backend() != "gpu"):
        return xla
    package = "pallas_kernels.head_rotation"
    module = mosaic_gpu_module(package, implementation, heads, k_pages, v_pages)
    if module is not None:
        return module
    width = heads.shape[2]
    if width & (width - 1):
        if implementation is not None:
            raise NotImplementedError(f"triton: the width must be a power of two ({heads.shape=})")
        return xla
    return implementation_module(package, "triton")
