"""Norms for Hopper GPUs: a warpgroup has a row, from global memory to registers and back.

All of a row is loaded at once, and the weight before the kernels before have ended. A row is added
in an order that follows from the number of features. The other reductions are Triton's kernels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.rows import THREADS, layout_of_row
from pallas_kernels.layered import as_stack, layer_operands, number_of
from pallas_kernels.row_reduce.triton import (
    log_sum_exp,
    norm_gradient,
    row_dot,
    row_sum,
    scaled_and_dot,
)

__all__ = [
    "add_norm",
    "check",
    "log_sum_exp",
    "norm_gradient",
    "rms_norm",
    "row_dot",
    "row_sum",
    "scaled_and_dot",
]

# Of a row: its values and the weight's are in registers, of which a thread has 255.
WIDEST = {"bfloat16": 16384, "float32": 8192}
VALUES = 2**31  # kernels count them in 32 bits


def check(x):
    """Of x [rows, features].

    Raises:
      NotImplementedError: the norms of this module cannot serve it.
    """
    features, widest = x.shape[1], WIDEST.get(str(x.dtype), 0)
    if features % THREADS or features > widest or not 0 < x.size < VALUES:
        raise NotImplementedError(
            f"implementation='mosaic_gpu' has norms of some rows, less than {VALUES} values, of "
            f"whole {THREADS} features, at most {WIDEST}; got x {x.dtype}{list(x.shape)}"
        )


def rms_norm(x, weight, eps):
    return _call("rms_norm", eps, 1, weight, x)[0]


def add_norm(x, more, weight, eps):
    return tuple(_call("add_norm", eps, 2, weight, x, more))


def _call(name: str, eps: float, results: int, weight, *parts):
    """Runs the kernel on rows [rows, features], which each of its results has the form of."""
    x = parts[0]
    kernel = kept_kernel(
        functools.partial(_body, eps, len(parts)),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * results,
        grid=(x.shape[0],),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
    )
    return kernel(*parts, as_stack(weight), *layer_operands(weight))


def _body(eps: float, count: int, *refs):
    """The norm of the sum of `count` arrays; of several the sum is a result, before the norm.

    Args:
      refs: the arrays [rows, features]; weights [layers, features]; the layer's number, see
        `number_of`; then the results, all [rows, features].
    """
    parts, weights = refs[:count], refs[count]
    layer, (*sums, normed) = refs[count + 1 : -count], refs[-count:]
    row, layout = lax.axis_index("row"), layout_of_row(normed.shape[-1], normed.dtype)
    if count == 1:
        # The first kernel of a layer: its number may come from the kernel before.
        wait_for_kernels_before(normed.shape[0])
    weight = plgpu.load(weights.at[number_of(layer)], layout=layout)
    if count > 1:
        wait_for_kernels_before(normed.shape[0])
    x = total_of(*(plgpu.load(its.at[row], layout=layout) for its in parts))
    for its in sums:
        its.at[row][...] = x
    normed.at[row][...] = scaled(x, scale_of(x, eps), weight)


def total_of(x, *more):
    """The sum of arrays, each rounded."""
    for its in more:
        x = (x.astype(jnp.float32) + its.astype(jnp.float32)).astype(x.dtype)
    return x


def scale_of(x, eps: float):
    """What norms a row, in `layout_of_row`: its bits follow from that."""
    wide = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(wide * wide) / x.size + eps)


def scaled(x, scale, weight):
    """Some of a row, normed."""
    return (x.astype(jnp.float32) * scale).astype(x.dtype) * weight
