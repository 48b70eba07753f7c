"""What a grouped attention does with its heads before it attends: norm, rotate, cache.

Letters: T tokens, H query heads, G key/value heads, D head width, P pages.
"""

from __future__ import annotations

from types import ModuleType

import jax
from jaxtyping import Array, Float

from pallas_kernels.head_rotation import differentiable, xla
from pallas_kernels.implementation import check_known, implementation_module, mosaic_gpu_module
from pallas_kernels.paged_attention.api import PageView, in_32_bits
from pallas_kernels.paged_attention.check import check_view

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
      ValueError: one weight without the other, or shapes that do not belong together.
      NotImplementedError: an implementation that does not exist or cannot serve these shapes.
    """
    check_heads(heads, cos, sin, k_pages, v_pages)
    check_view(view, heads.shape[0])
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight: queries and keys are normed, or neither are")
    return differentiable.rotate_and_cache(
        _backend(implementation, heads, k_pages, v_pages), float(eps),
        heads, q_weight, k_weight, cos, sin, k_pages, v_pages, in_32_bits(view),
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

    Raises:
      ValueError: x has other axes, its width is odd, or there is no angle for each token and pair.
    """
    if x.ndim != 3:
        raise ValueError(f"x must be [tokens, heads, width], got {x.shape}")
    check_angles(x.shape[0], x.shape[-1], cos, sin)
    return xla.rotate(x, cos, sin, interleaved)


def check_heads(heads, cos, sin, k_pages, v_pages) -> None:
    """Raises ValueError unless these are arguments of `rotate_and_cache`."""
    if heads.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            "heads must be [tokens, all_heads, width], k_pages and v_pages [pages, page_size, "
            f"kv_heads, width], got {heads.shape}, {k_pages.shape} and {v_pages.shape}"
        )
    tokens, count, width = heads.shape
    if k_pages.shape[3] != width or count <= 2 * k_pages.shape[2]:
        raise ValueError(
            f"heads must be more than twice {k_pages.shape[2]}, as many as k_pages has, and as "
            f"wide as these, {k_pages.shape[3]}, got {heads.shape}"
        )
    check_angles(tokens, width, cos, sin)


def check_angles(tokens: int, width: int, cos, sin) -> None:
    """Raises ValueError unless there is an angle for each token and pair of features."""
    if width % 2:
        raise ValueError(f"features are rotated in pairs, got a width of {width}")
    for name, array in dict(cos=cos, sin=sin).items():
        if array.shape != (tokens, width // 2):
            expected = [tokens, width // 2]
            raise ValueError(f"{name} must be {expected}, got {list(array.shape)}")


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
