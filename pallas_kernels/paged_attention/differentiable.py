"""Paged attention and cache writes, over any backend, with gradients.

The gradient of attention is for batches that hold whole sequences: of every request in the batch
its positions from 0 on, so that a token attends to tokens of the batch alone. What the cache held
before is a constant. A backend that has `attention_gradients` of its own serves grouped heads with
them; else, and for latents, they are plain JAX.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import implementation_module, platform_implementation
from pallas_kernels.kept import kept
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.backward import attention_gradients
from pallas_kernels.paged_attention.xla import read_pages


@jax.custom_vjp
def write_pages(pages, values, view):
    """See `api.write_pages`."""
    return xla.write_pages(pages, values, view)


def _write_forward(pages, values, view):
    # Differentiated outside of jit, NumPy arguments arrive as they are, here and below.
    pages, values, view = jax.tree.map(jnp.asarray, (pages, values, view))
    return xla.write_pages(pages, values, view), (view, jnp.zeros(0, values.dtype))


def _write_backward(saved, dpages):
    dpages, (view, like) = jnp.asarray(dpages), saved
    dvalues = read_pages(dpages, view).astype(like.dtype)
    return xla.write_pages(dpages, jnp.zeros_like(dvalues), view), dvalues, None


write_pages.defvjp(_write_forward, _write_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def paged_attention(
    backend: ModuleType, scale: float, sliding_window: int | None, q, k_pages, v_pages, view, sinks
):
    """See `api.paged_attention`."""
    return backend.paged_attention(q, k_pages, v_pages, view, scale, sliding_window, sinks)


def _forward(backend, scale, sliding_window, *arguments):
    arguments = jax.tree.map(jnp.asarray, arguments)
    out = kept(paged_attention(backend, scale, sliding_window, *arguments))
    return out, (*arguments, out)


def _backward(backend, scale, sliding_window, saved, dout):
    q, k_pages, v_pages, view, sinks, out, dout = jax.tree.map(jnp.asarray, (*saved, dout))
    k, v = read_pages(k_pages, view), read_pages(v_pages, view)
    gradients = gradients_of(backend)
    dq, dk, dv = gradients(q, k, v, out, dout, view, scale, sliding_window, sinks)
    dk, dv = as_pages(dk, k_pages, view), as_pages(dv, v_pages, view)
    return dq.astype(q.dtype), dk, dv, None, None


paged_attention.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def paged_latent_attention(
    backend: ModuleType, scale: float, q_latent, q_rope, latent_pages, rope_pages, view
):
    """See `api.paged_latent_attention`."""
    return backend.paged_latent_attention(q_latent, q_rope, latent_pages, rope_pages, view, scale)


def _latent_forward(backend, scale, q_latent, q_rope, latent_pages, rope_pages, view):
    arguments = q_latent, q_rope, latent_pages, rope_pages, view
    arguments = jax.tree.map(jnp.asarray, arguments)
    out = kept(paged_latent_attention(backend, scale, *arguments))
    return out, (*arguments, out)


def _latent_backward(backend, scale, saved, dout):
    """One key/value head: the keys are latent and rope key side by side, the values the latent."""
    saved = jax.tree.map(jnp.asarray, (*saved, dout))
    q_latent, q_rope, latent_pages, rope_pages, view, out, dout = saved
    latent, rope = read_pages(latent_pages, view), read_pages(rope_pages, view)
    width = latent.shape[-1]
    q, k = jnp.concatenate([q_latent, q_rope], -1), jnp.concatenate([latent, rope], -1)
    k, v = k[:, None], latent[:, None]
    gradients = _of_tokens(attention_gradients)
    dq, dk, dv = gradients(q, k, v, out, dout, view, scale, None, None)
    dlatent, dq = dk[:, 0, :width] + dv[:, 0], dq.astype(q.dtype)
    return (
        dq[..., :width],
        dq[..., width:],
        as_pages(dlatent, latent_pages, view),
        as_pages(dk[:, 0, width:], rope_pages, view),
        None,
    )


paged_latent_attention.defvjp(_latent_forward, _latent_backward)


def gradients_of(backend: ModuleType):
    """Its own gradients of grouped heads, or those in plain JAX, whose form they have."""
    return _of_tokens(getattr(backend, "attention_gradients", attention_gradients))


def _of_tokens(gradients):
    """Gradients where there is a token; else what none have."""

    def of_any(q, k, v, *others):
        if not q.shape[0]:
            return q, k, v
        return gradients(q, k, v, *others)

    return of_any


def platform_gradients():
    """Those that serve the platform best."""
    name = platform_implementation()
    if name == "xla":
        return gradients_of(xla)
    return gradients_of(implementation_module("pallas_kernels.paged_attention", name))


def as_pages(values, pages, view):
    """The gradient of pages from that of the values that were written, which read them alone."""
    return xla.write_pages(jnp.zeros_like(pages), values, view)
