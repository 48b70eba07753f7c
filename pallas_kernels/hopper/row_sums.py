"""Sums over rows in registers, in one order whatever the layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith


def row_sums(values: jax.Array, layout, *, interpreted: bool) -> jax.Array:
    """float32 [rows] of [rows, columns] in a layout: one register after the other, then lanes.

    `values.sum(axis=1)` adds to as many sums beside each other as a thread's rows leave room for: a
    row's last bit would depend on how many rows are with it.
    """
    if interpreted:
        return values.sum(axis=1)
    sums = plgpu.ShapeDtypeStruct(values.shape[:1], jnp.float32, layout=layout.reduce(1))

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=sums)
    def add_up(context, values):
        del context
        # Of an operation that it has no name for it makes one sum.
        return values.reduce(arith.addf, 1)

    return add_up(values)
