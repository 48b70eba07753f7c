"""Reductions over the features of a row whose bits depend on that row alone.

The compiler orders a plain reduction by the shape of the whole array, so that a row's sum can
differ in its last bit between a batch of 8 and one of 128. All are differentiable, with gradients
that are as independent.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.floats import check_floats
from pallas_kernels.implementation import check_known, implementation_module, mosaic_gpu_module
from pallas_kernels.row_reduce import differentiable

IMPLEMENTATIONS = ("xla", "triton", "mosaic_gpu")


def row_sum(
    x: Float[Array, "*rows features"], *, implementation: str | None = None
) -> Float[Array, "*rows one"]:
    """Sum over the last axis, kept as an axis of size 1.

    Args:
      implementation: "xla", "triton" (GPUs) or "mosaic_gpu" (Hopper GPUs), whose norms alone differ
        from those of "triton"; None takes what serves the platform best. Their bits differ.

    Raises:
      NotImplementedError: there is no such implementation, or it cannot serve these shapes.
    """
    rows = x.reshape(-1, x.shape[-1])
    return differentiable.row_sum(_backend(implementation), rows).reshape(*x.shape[:-1], 1)


def row_dot(
    x: Float[Array, "*rows features"],
    y: Float[Array, "*rows features"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*rows one"]:
    """`row_sum` of x · y, in float32 or what is wider.

    Args and errors: see `row_sum`; ValueError: x and y are not of one shape.
    """
    check_floats(dict(x=x, y=y))
    _check_shape("y", y, x.shape)
    rows = (its.reshape(-1, x.shape[-1]) for its in (x, y))
    return differentiable.row_dot(_backend(implementation), *rows).reshape(*x.shape[:-1], 1)


def scaled_and_dot(
    x: Float[Array, "rows features"],
    y: Float[Array, "rows features"],
    scale: Float[Array, "rows one"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows features"], Float[Array, "rows one"]]:
    """x times the rows' scales, in y's dtype, and `row_dot` of x and y: x is read once.

    Not differentiable. Args and errors: see `row_sum`.
    """
    return _backend(implementation).scaled_and_dot(x, y, scale)


def rms_norm(
    x: Float[Array, "*rows features"],
    weight: Float[Array, " features"],
    eps: float,
    *,
    implementation: str | None = None,
) -> Float[Array, "*rows features"]:
    """x / rms(x) in float32, cast back to x's dtype, times the weight in x's dtype.

    A `Layered` weight has no gradient. Args and errors: see `row_sum`; ValueError: x is no array of
    floating-point numbers, or the weight not of its features.
    """
    check_floats(dict(x=x))
    _check_shape("weight", weight, x.shape[-1:])
    rows = x.reshape(-1, x.shape[-1])
    weight = weight.astype(x.dtype)
    backend = _backend_of_norms(implementation, rows)
    return differentiable.rms_norm(backend, float(eps), rows, weight).reshape(x.shape)


def add_norm(
    x: Float[Array, "*rows features"],
    more: Float[Array, "*rows features"],
    weight: Float[Array, " features"],
    eps: float,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows features"], Float[Array, "*rows features"]]:
    """x + more, and `rms_norm` of it.

    Args and errors: see `rms_norm`; ValueError: x and more are not of one shape.
    """
    check_floats(dict(x=x, more=more))
    _check_shape("more", more, x.shape)
    _check_shape("weight", weight, x.shape[-1:])
    rows, more = (its.reshape(-1, x.shape[-1]) for its in (x, more))
    weight = weight.astype(x.dtype)
    backend = _backend_of_norms(implementation, rows)
    found = differentiable.add_norm(backend, float(eps), rows, more, weight)
    return tuple(its.reshape(x.shape) for its in found)


def log_sum_exp(
    x: Float[Array, "rows features"], *, implementation: str | None = None
) -> Float[Array, " rows"]:
    """log(sum(exp(x))) of rows, in float32 or what is wider; -inf counts nothing.

    Args and errors: see `row_sum`; ValueError: x is not `[rows, features]`.
    """
    check_floats(dict(x=x))
    if x.ndim != 2:
        raise ValueError(f"x must be [rows, features], got {x.shape}")
    x = x.astype(jnp.promote_types(jnp.float32, x.dtype))
    return differentiable.log_sum_exp(_backend(implementation), x)


def _check_shape(name: str, array, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ValueError(f"{name} must be {list(expected)}, as x says, got {list(array.shape)}")


def _backend(implementation: str | None) -> ModuleType:
    check_known(implementation, IMPLEMENTATIONS)
    platform = "triton" if jax.default_backend() == "gpu" else "xla"
    return implementation_module("pallas_kernels.row_reduce", implementation or platform)


def _backend_of_norms(implementation: str | None, rows) -> ModuleType:
    """Of rows [rows, features]: Hopper's kernels are for some numbers of features."""
    module = mosaic_gpu_module("pallas_kernels.row_reduce", implementation, rows)
    return module or _backend(implementation)
