"""Kernels for GPUs in any floating-point type, of any size: what the Hopper kernels do not serve.

A tile is some rows of one group and some columns. Float32 is multiplied as float32, not as tf32:
one thread adds up an output's products in order of K, one fused multiply-add after another, and
bfloat16's tensor core instruction adds 16 of them at a time, in any tile of less than 64 rows
(NOTES.md). So bits do not depend on the tile, whose size may follow the number of rows. The host
decides nothing while the device works, as it does for each turn of a loop in plain JAX. Dispatch
and the gradients of factors are those of plain JAX. The backend interface is described in
`differentiable.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.grouped_lora_matmul import xla
from pallas_kernels.grouped_lora_matmul.base_product import tiles
from pallas_kernels.grouped_lora_matmul.gate import gated_columns
from pallas_kernels.grouped_lora_matmul.lora import has_slot
from pallas_kernels.rounded import rounded


class Tile(NamedTuple):
    """Rows and columns of the result, and the columns of K in one step."""

    rows: int
    columns: int
    depth: int


READS_LAYERS = False
NORMED_ROWS = EXPERTS_AT_ONCE = ROUTED_AT_ONCE = 0
SHRINKS_WITH_OUTER = False
LOW, TALL = Tile(16, 16, 128), Tile(32, 64, 32)
MOST_LOW = 512  # tiles: with more, low ones take longer than tall ones
SHRINK_DEPTH = 256

dispatch, outer = xla.dispatch, xla.outer


def check(x, w, lora, parts, out_dtype=None):
    """Raises NotImplementedError for what the kernels cannot serve."""
    del lora, parts, out_dtype
    if x.shape[0] == 0 or x.shape[1] == 0 or jnp.float64 in (x.dtype, w.dtype):
        raise NotImplementedError(
            "triton: there must be a row and a column, of at most 32 bits "
            f"(x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)})"
        )


def tables(group_sizes, row_slots, groups: int) -> xla.Tables:
    """See `differentiable.py`."""
    return xla.tables(group_sizes, row_slots, groups)


def tile_of(rows: int, groups: int, width: int) -> Tile:
    """Low tiles where there are few rows: each waits for memory, and more of them wait together.

    The interpreter's products order their sums by the tile, so that it has to be one there.
    """
    tiles = (pl.cdiv(rows, LOW.rows) + groups) * pl.cdiv(width, LOW.columns)
    return TALL if tiles > MOST_LOW or jax.default_backend() == "cpu" else LOW


def product(
    x,
    w,
    tables: xla.Tables,
    u,
    factors,
    starts,
    firsts,
    *,
    contract,
    gate=None,
    out_dtype=None,
    bias=None,
):
    """See `differentiable.py`."""
    rows, width, groups = x.shape[0], w.shape[3 - contract], w.shape[0]
    sizes = tables.group_sizes
    if sizes is None:
        sizes = jnp.full(groups, rows // groups, jnp.int32)
    tile = tile_of(rows, groups, width)
    count, *words = tiles(sizes.astype(jnp.int32), rows, tile.rows)
    terms = [
        (its, factor.reshape(-1, *factor.shape[-2:]), xla.matrix_of_row(tables, factor, first))
        for its, factor, first in zip(u, factors, firsts, strict=True)
    ]
    spans = [(first, factor.shape[0]) for first, factor in zip(firsts, factors, strict=True)]
    flat = [array for term in terms for array in term]
    call = pl.pallas_call(
        functools.partial(_product_kernel, tile, rows, contract, starts, spans, len(flat)),
        # Tiles write their full height where the interpreter runs; rows past the end are cut off.
        out_shape=jax.ShapeDtypeStruct((rows + tile.rows, width), jnp.float32),
        grid=(words[0].shape[0], pl.cdiv(width, tile.columns)),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=jax.default_backend() == "cpu",
        name="grouped_product",
    )
    y = call(count[None], *words, tables.row_slots, x, w, *flat)[:rows]
    if bias is not None:
        # Here, or the compiler may start the sums of one tile with it, and end those of another.
        y = xla.with_bias(y, bias, tables)
    inside = jnp.arange(rows) < jnp.sum(sizes)
    y = rounded(jnp.where(inside[:, None], y, 0), out_dtype or x.dtype)
    return y if gate is None else gated_columns(y, gate)


def _product_kernel(
    tile, rows, contract, starts, spans, flat, count, group, first, left, slots, x, w, *refs
):
    terms, y = refs[:flat], refs[flat]
    number, (depth, width) = pl.program_id(0), _kn(w, contract)
    real_tile = number < count[0]
    here, first_row = group[number], first[number]
    offset = lax.broadcasted_iota(jnp.int32, (tile.rows, 1), 0)
    row = first_row + offset
    real_row = real_tile & (offset < left[number]) & (row < rows)
    row = jnp.where(real_tile, row, offset)
    column = lax.broadcasted_iota(jnp.int32, (1, tile.columns), 1)
    column = pl.program_id(1) * tile.columns + column
    operand = jnp.promote_types(x.dtype, w.dtype)

    def add(step, total):
        k = step * tile.depth + jnp.arange(tile.depth, dtype=jnp.int32)
        left_part = plgpu.load(
            x.at[row, k[None]], mask=real_row & (k[None] < depth), other=0
        ).astype(operand)
        where = (column, k[:, None]) if contract == 2 else (k[:, None], column)
        inside = real_tile & (k[:, None] < depth) & (column < width)
        right_part = plgpu.load(w.at[here, *where], mask=inside, other=0).astype(operand)
        precision = lax.Precision.HIGHEST if operand == jnp.float32 else None
        return total + jnp.dot(
            left_part, right_part, precision=precision, preferred_element_type=jnp.float32
        )

    total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(depth, tile.depth), add, total)
    slot = plgpu.load(slots.at[row], mask=real_row, other=-1)
    for term, start in enumerate(starts):
        u, factor, index = terms[3 * term : 3 * term + 3]
        mine = has_slot(slot, *spans[term])
        total = _expand(total, row, column - start, mine, u, factor, index)
    plgpu.store(y.at[row, column], total, mask=real_row & (column < width))


def _kn(w, contract):
    """K and N of the weights."""
    return (w.shape[2], w.shape[1]) if contract == 2 else (w.shape[1], w.shape[2])


def _expand(total, row, column, adapted, u, factor, index):
    """The sums plus u · B, rank after rank, of the rows that have one of its adapters."""
    matrices, ranks, width = factor.shape
    matrix = plgpu.load(index.at[row], mask=adapted, other=0)
    inside = adapted & (column >= 0) & (column < width)

    def add(rank, total):
        low = plgpu.load(u.at[row, rank], mask=adapted, other=0)
        values = plgpu.load(factor.at[matrix, rank, column], mask=inside, other=0)
        return jnp.where(inside, total + low * values.astype(jnp.float32), total)

    return lax.fori_loop(0, ranks, add, total)


def shrink(x, tables: xla.Tables, factors, starts, scalings, firsts):
    """See `differentiable.py`; u is float32."""
    results = []
    for factor, start, scaling, first in zip(factors, starts, scalings, firsts, strict=True):
        index = xla.matrix_of_row(tables, factor, first)
        flat = factor.reshape(-1, *factor.shape[-2:])
        call = pl.pallas_call(
            functools.partial(_shrink_kernel, start, (first, factor.shape[0])),
            out_shape=jax.ShapeDtypeStruct((x.shape[0], flat.shape[1]), jnp.float32),
            grid=(x.shape[0],),
            compiler_params=plgpu.CompilerParams(num_warps=4),
            interpret=jax.default_backend() == "cpu",
            name="grouped_shrink",
        )
        u = call(tables.row_slots, index, x, flat)
        if scaling is not None:
            u = u * scaling.reshape(-1)[xla.matrix_of_row(tables, scaling, first)][:, None]
        results.append(u)
    return tuple(results)


def _shrink_kernel(start, span, slots, index, x, factor, u):
    row, (_, ranks, depth) = pl.program_id(0), factor.shape
    height = pl.next_power_of_2(ranks)
    rank = lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    matrix, adapted = index[row], has_slot(slots[row], *span)

    def add(step, total):
        k = step * SHRINK_DEPTH + lax.broadcasted_iota(jnp.int32, (1, SHRINK_DEPTH), 1)
        inside = adapted & (k < depth)
        values = plgpu.load(x.at[row, start + k], mask=inside, other=0)
        its = plgpu.load(factor.at[matrix, rank, k], mask=inside & (rank < ranks), other=0)
        return total + values.astype(jnp.float32) * its.astype(jnp.float32)

    steps = pl.cdiv(depth, SHRINK_DEPTH)
    total = lax.fori_loop(0, steps, add, jnp.zeros((height, SHRINK_DEPTH), jnp.float32))
    total, rank = total.sum(axis=1), jnp.arange(height)
    plgpu.store(u.at[row, rank], total, mask=rank < ranks)


shrink_for_product = shrink  # products take u as it is
