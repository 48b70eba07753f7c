"""The row reductions of any backend with their gradients.

A backend is a module (`xla`, `triton`, `mosaic_gpu`) with `row_sum`, `row_dot`, `rms_norm`,
`add_norm`, `log_sum_exp`, and

    norm_gradient(x, weight, dy, eps, more=None)
        The gradient of x [rows, features] from that of it normed, in x's dtype; plus more.

None of them is differentiable by itself. Weights may be `Layered`, which are frozen.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layered import is_layered


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def row_sum(backend: ModuleType, x):
    """[rows, 1] of x [rows, features]."""
    return backend.row_sum(x)


def _row_sum_forward(backend, x):
    return backend.row_sum(x), x


def _row_sum_backward(backend, x, dy):
    return (jnp.broadcast_to(dy, x.shape),)


row_sum.defvjp(_row_sum_forward, _row_sum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def row_dot(backend: ModuleType, x, y):
    """[rows, 1] of x · y, [rows, features] each."""
    return backend.row_dot(x, y)


def _row_dot_forward(backend, x, y):
    return backend.row_dot(x, y), (x, y)


def _row_dot_backward(backend, saved, d):
    x, y = saved
    return (d * y).astype(x.dtype), (d * x).astype(y.dtype)


row_dot.defvjp(_row_dot_forward, _row_dot_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rms_norm(backend: ModuleType, eps: float, x, weight):
    """x [rows, features] normed; weight in x's dtype."""
    return backend.rms_norm(x, weight, eps)


def _rms_norm_forward(backend, eps, x, weight):
    return backend.rms_norm(x, weight, eps), (x, weight)


def _rms_norm_backward(backend, eps, saved, dy):
    dx = backend.norm_gradient(*saved, dy, eps)
    return dx, _weight_gradient(backend, eps, *saved, dy)


def _weight_gradient(backend, eps, x, weight, dy):
    if is_layered(weight):
        return None
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(backend.row_sum(wide * wide) / x.shape[1] + eps)
    dweight = jnp.sum(dy.astype(jnp.float32) * (wide * inverse), axis=0)
    return dweight.astype(weight.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def add_norm(backend: ModuleType, eps: float, x, more, weight):
    """x + more [rows, features], and it normed; weight in x's dtype."""
    return backend.add_norm(x, more, weight, eps)


def _add_norm_forward(backend, eps, x, more, weight):
    total, normed = backend.add_norm(x, more, weight, eps)
    return (total, normed), (total, weight)


def _add_norm_backward(backend, eps, saved, gradients):
    dtotal, dnormed = gradients
    dx = backend.norm_gradient(*saved, dnormed, eps, dtotal)
    return dx, dx, _weight_gradient(backend, eps, *saved, dnormed)


add_norm.defvjp(_add_norm_forward, _add_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_sum_exp(backend: ModuleType, x):
    """[rows] of float32 x [rows, features]."""
    return backend.log_sum_exp(x)


def _log_sum_exp_forward(backend, x):
    y = backend.log_sum_exp(x)
    return y, (x, y)


def _log_sum_exp_backward(backend, saved, dy):
    x, y = saved
    y = jnp.where(y == -jnp.inf, 0, y)  # of a row of -inf alone, which has no gradient
    return (dy[:, None] * jnp.exp(x - y[:, None]),)


log_sum_exp.defvjp(_log_sum_exp_forward, _log_sum_exp_backward)
