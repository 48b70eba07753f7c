"""The sum of a token's choices, and what it is added to, on Hopper GPUs.

XLA's kernel does the same for any number of tokens. This one, for few, lets the next one begin
while it waits (`hopper/dependent_launch.py`), whose weights are on their way then.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.rows import THREADS, layout_of_row
from pallas_kernels.row_reduce.mosaic_gpu import total_of

COLUMNS = 2 * THREADS  # of a program: one load of each row by each thread


def add_choices(residual, rows, weights, dtype):
    """residual + `combine` of rows in order of choices, rounded to its type before and after.

    Args:
      residual: bfloat16 [T, H]. rows: bfloat16 [T * choices, H].
      weights: float32 [T, choices]. dtype: what they are rounded to; here, as a conversion alone
        would be a kernel.

    Returns:
      [T, H], or None if H is no whole number of programs' columns.
    """
    tokens, hidden = residual.shape
    if hidden % COLUMNS:
        return None
    kernel = kept_kernel(
        functools.partial(_body, weights.shape, jnp.dtype(dtype)),
        out_type=jax.ShapeDtypeStruct(residual.shape, residual.dtype),
        grid=(tokens, hidden // COLUMNS),
        grid_names=("token", "part"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="add_choices",
    )
    return kernel(residual, rows, weights)


def _body(shape: tuple[int, int], dtype, residual, rows, weights, y):
    tokens, choices = shape
    token, part = lax.axis_index("token"), lax.axis_index("part")
    wait_for_kernels_before(tokens, small=True)
    columns = pl.ds(part * COLUMNS, COLUMNS)
    load = functools.partial(plgpu.load, layout=layout_of_row(COLUMNS, y.dtype))
    # All on their way together.
    loaded = [load(rows.at[token * choices + choice, columns]) for choice in range(choices)]
    x = load(residual.at[token, columns])
    products = (
        its.astype(jnp.float32) * weights[token, choice].astype(dtype).astype(jnp.float32)
        for choice, its in enumerate(loaded)
    )
    total = functools.reduce(operator.add, products)
    y.at[token, columns][...] = total_of(x, total.astype(x.dtype))
