"""`rotate_and_cache_latents` and its gradient, which is that of plain operations, over any backend.

A backend is a module (`xla`, `triton`) with one function, not differentiable by itself.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.latent_rotation import xla
from pallas_kernels.layered import is_layered, without_layers


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rotate_and_cache_latents(
    backend: ModuleType, sizes, q, kv, weight, cos, sin, latent_pages, rope_pages, view
):
    """See `api.rotate_and_cache_latents`."""
    pages = latent_pages, rope_pages
    return backend.rotate_and_cache_latents(sizes, q, kv, weight, cos, sin, *pages, view)


def _forward(backend, sizes, *arguments):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    arguments = jax.tree.map(jnp.asarray, arguments)
    return rotate_and_cache_latents(backend, sizes, *arguments), arguments


def _backward(backend, sizes, arguments, gradients):
    q, kv, weight, cos, sin, latent_pages, rope_pages, view = arguments

    def plain(q, kv, weight, *pages):
        return xla.rotate_and_cache_latents(sizes, q, kv, weight, cos, sin, *pages, view)

    inputs = q, kv, without_layers(weight), latent_pages, rope_pages
    dq, dkv, dweight, *dpages = jax.vjp(plain, *inputs)[1](gradients)
    return dq, dkv, None if is_layered(weight) else dweight, None, None, *dpages, None


rotate_and_cache_latents.defvjp(_forward, _backward)
