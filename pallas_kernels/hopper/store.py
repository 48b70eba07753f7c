"""Storing to shared memory, and from there: any number of rows, columns in whole lines."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LINE = 128  # bytes of shared memory


def transforms_of_lines(dtype):
    """Of shared memory in lines of 64: one of two bytes each is a swizzle; there is none that a
    line of float32 fits into, or of which a part could be copied."""
    if jnp.dtype(dtype).itemsize > 2:
        return ()
    return plgpu.TilingTransform((1, 64)), plgpu.SwizzleTransform(LINE)


def store_turned(rows, values, *, swizzled: bool = True):
    """Stores a product's values [columns, rows] in shared memory, turned."""
    turned = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    store_registers(rows.T, turned, swizzled=swizzled)


def store_registers(target, values, *, swizzled: bool):
    """Stores registers where it may cost more: in shared memory without a swizzle, with bank
    conflicts, or in global memory, in parts of its lines.

    From JAX 0.12 on Mosaic wants to be told that this is accepted.
    """
    if swizzled or not hasattr(plgpu, "store"):
        target[...] = values
    else:
        plgpu.store(target, values, optimized=False)


def store_rows(buffer, target, first_row, count, rows, *rest):
    """Stores the first `count` of a buffer's `rows` rows, in pieces of powers of two.

    `rest` says where in the target's other axes.

    The copy engine's boxes have static sizes and begin at whole lines of the buffer, and rows past
    `count` belong to others.
    """
    row_bytes = buffer.shape[-1] * jnp.dtype(buffer.dtype).itemsize
    rows_of_line = max(1, LINE // row_bytes)

    def copy(offset, size):
        plgpu.copy_smem_to_gmem(
            buffer.at[pl.ds(offset, size)],
            target.at[pl.ds(first_row + offset, size), *rest],
            commit_group=False,
        )

    pl.when(count == rows)(lambda: copy(0, rows))

    @pl.when(count < rows)
    def _pieces():
        size = 1 << (rows - 1).bit_length() >> 1
        while size >= rows_of_line:
            # What the larger pieces have stored: the higher bits of count.
            offset = count & (-2 * size)
            pl.when((count & size) != 0)(functools.partial(copy, offset, size))
            size //= 2
        for size in range(1, rows_of_line):
            rest_of_line = count & (rows_of_line - 1)
            pl.when(rest_of_line == size)(functools.partial(copy, count - size, size))

    plgpu.commit_smem_to_gmem_group()


def whole_lines(width: int, line: int) -> int:
    """Columns of an array that is stored in lines: copies past its end write nothing.

    Two lines at least: where there is one, Mosaic drops its index, and a copy of another line
    would overwrite it.
    """
    return max(2, -(-width // line)) * line
