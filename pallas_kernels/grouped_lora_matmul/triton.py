"""Kernels for GPUs in any floating-point type, of any size: what the Hopper kernels do not serve.

A tile is 32 rows of one group and 64 columns, whatever the number of rows, so that a row's sums
have one order. Float32 is multiplied as float32, not as tf32. The host decides nothing while the
device works, as it does for each turn of a loop in plain JAX. Dispatch and the gradients of
factors are those of plain JAX. The backend interface is described in `differentiable.py`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.grouped_lora_matmul import xla
from pallas_kernels.grouped_lora_matmul.base_product import tiles
from pallas_kernels.grouped_lora_matmul.gate import gated_columns

ROWS = 32
COLUMNS = 64
DEPTH = 32  # of K, in one step of a product
SHRINK_DEPTH = 256

dispatch, outer = xla.dispatch, xla.outer


def check(x, w, lora, parts):
    """Raises NotImplementedError for what the kernels cannot serve."""
    del lora, parts
    if x.shape[0] == 0 or x.shape[1] == 0 or jnp.float64 in (x.dtype, w.dtype):
        raise NotImplementedError(
            "triton: there must be a row and a column, of at most 32 bits "
            f"(x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)})"
        )


def tables(group_sizes, row_slots, groups: int) -> xla.Tables:
    """See `differentiable.py`."""
    return xla.tables(group_sizes, row_slots, groups)


def product(x, w, tables: xla.Tables, u, factors, starts, *, contract, gate=None):
    """See `differentiable.py`."""
    rows, width, groups = x.shape[0], w.shape[3 - contract], w.shape[0]
    sizes = tables.group_sizes
    if sizes is None:
        sizes = jnp.full(groups, rows // groups, jnp.int32)
    count, *words = tiles(sizes.astype(jnp.int32), rows, ROWS)
    terms = [
        (its, factor.reshape(-1, *factor.shape[-2:]), xla.matrix_of_row(tables, factor))
        for its, factor in zip(u, factors, strict=True)
    ]
    flat = [array for term in terms for array in term]
    call = pl.pallas_call(
        functools.partial(_product_kernel, rows, contract, starts, len(flat)),
        # Tiles write their full height where the interpreter runs; rows past the end are cut off.
        out_shape=jax.ShapeDtypeStruct((rows + ROWS, width), jnp.float32),
        grid=(words[0].shape[0], pl.cdiv(width, COLUMNS)),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=jax.default_backend() == "cpu",
        name="grouped_product",
    )
    y = call(count[None], *words, tables.row_slots, x, w, *flat)[:rows]
    inside = jnp.arange(rows) < jnp.sum(sizes)
    y = jnp.where(inside[:, None], y, 0).astype(x.dtype)
    return y if gate is None else gated_columns(y, gate)


def _product_kernel(rows, contract, starts, flat, count, group, first, left, slots, x, w, *refs):
    terms, y = refs[:flat], refs[flat]
    tile, (depth, width) = pl.program_id(0), _kn(w, contract)
    real_tile = tile < count[0]
    here, first_row = group[tile], first[tile]
    offset = lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
    row = first_row + offset
    real_row = real_tile & (offset < left[tile]) & (row < rows)
    row = jnp.where(real_tile, row, offset)
    column = pl.program_id(1) * COLUMNS + lax.broadcasted_iota(jnp.int32, (1, COLUMNS), 1)
    operand = jnp.promote_types(x.dtype, w.dtype)

    def add(step, total):
        k = step * DEPTH + jnp.arange(DEPTH, dtype=jnp.int32)
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

    total = lax.fori_loop(0, pl.cdiv(depth, DEPTH), add, jnp.zeros((ROWS, COLUMNS), jnp.float32))
    slot = plgpu.load(slots.at[row], mask=real_row, other=-1)
    for term, start in enumerate(starts):
        u, factor, index = terms[3 * term : 3 * term + 3]
        total = _expand(total, row, column - start, slot >= 0, u, factor, index)
    plgpu.store(y.at[row, column], total, mask=real_row & (column < width))


def _kn(w, contract):
    """K and N of the weights."""
    return (w.shape[2], w.shape[1]) if contract == 2 else (w.shape[1], w.shape[2])


def _expand(total, row, column, adapted, u, factor, index):
    """The sums plus u · B, rank after rank, of the rows that have an adapter."""
    matrices, ranks, width = factor.shape
    matrix = plgpu.load(index.at[row], mask=adapted, other=0)
    inside = adapted & (column >= 0) & (column < width)

    def add(rank, total):
        low = plgpu.load(u.at[row, rank], mask=adapted, other=0)
        values = plgpu.load(factor.at[matrix, rank, column], mask=inside, other=0)
        return jnp.where(inside, total + low * values.astype(jnp.float32), total)

    return lax.fori_loop(0, ranks, add, total)


def shrink(x, tables: xla.Tables, factors, starts, scalings):
    """See `differentiable.py`; u is float32."""
    results = []
    for factor, start, scaling in zip(factors, starts, scalings, strict=True):
        index = xla.matrix_of_row(tables, factor)
        flat = factor.reshape(-1, *factor.shape[-2:])
        call = pl.pallas_call(
            functools.partial(_shrink_kernel, start),
            out_shape=jax.ShapeDtypeStruct((x.shape[0], flat.shape[1]), jnp.float32),
            grid=(x.shape[0],),
            compiler_params=plgpu.CompilerParams(num_warps=4),
            interpret=jax.default_backend() == "cpu",
            name="grouped_shrink",
        )
        u = call(tables.row_slots, index, x, flat)
        if scaling is not None:
            u = u * scaling.reshape(-1)[xla.matrix_of_row(tables, scaling)][:, None]
        results.append(u)
    return tuple(results)


def _shrink_kernel(start, slots, index, x, factor, u):
    row, (_, ranks, depth) = pl.program_id(0), factor.shape
    height = pl.next_power_of_2(ranks)
    rank = lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    matrix, adapted = index[row], slots[row] >= 0

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
