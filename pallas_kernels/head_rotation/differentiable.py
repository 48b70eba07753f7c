"""`rotate_and_cache` and its gradients, over any backend.

A backend is a module (`xla`, `triton`, `mosaic_gpu`) with two functions, neither differentiable by
itself: `rotate_and_cache`, and `head_gradients`, the gradient of the heads from those of its
results.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.head_rotation import xla
from pallas_kernels.layered import is_layered, without_layers


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rotate_and_cache(
    backend: ModuleType, eps: float,
    heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view,
):  # fmt: skip
    """See `api.rotate_and_cache`."""
    return backend.rotate_and_cache(
        heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, eps
    )


def _forward(backend, eps, *arguments):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    arguments = jax.tree.map(jnp.asarray, arguments)
    return rotate_and_cache(backend, eps, *arguments), arguments


def _backward(backend, eps, arguments, gradients):
    heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view = arguments

    def plain(weights, *pages):
        return xla.rotate_and_cache(heads, *weights, cos, sin, *pages, view, eps)

    # `jit` drops what nobody asks for, of this as a rule all.
    weights = without_layers((q_weight, k_weight))
    _, pullback = jax.vjp(plain, weights, k_pages, v_pages)
    dweights, dk_pages, dv_pages = pullback(gradients)
    frozen = (its is None or is_layered(its) for its in (q_weight, k_weight))
    dweights = (None if its else dweight for its, dweight in zip(frozen, dweights, strict=True))
    dheads = backend.head_gradients(heads, q_weight, k_weight, cos, sin, *gradients, view, eps)
    return dheads, *dweights, None, None, dk_pages, dv_pages, None


rotate_and_cache.defvjp(_forward, _backward)
