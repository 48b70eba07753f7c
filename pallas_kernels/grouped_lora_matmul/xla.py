"""`grouped_lora_matmul` in plain JAX: the CPU default, and the fallback on every platform.

The base product is in `base_product.py`. The low-rank product is elementwise: each row reads its
own A and B in place, a few rank rows or columns at a time, so nothing of size rows x rank x width
is stored, the cost does not grow with slots or groups, and a row never touches another adapter's
values. The backend interface is described in `differentiable.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.apart import apart
from pallas_kernels.grouped_lora_matmul.base_product import (
    count_below,
    grouped_product,
    tiles,
)
from pallas_kernels.grouped_lora_matmul.gate import gated_columns
from pallas_kernels.grouped_lora_matmul.joined_terms import joined_terms
from pallas_kernels.grouped_lora_matmul.lora import has_slot
from pallas_kernels.rounded import rounded
from pallas_kernels.routing_plan.api import routing_plan

READS_LAYERS = False
NORMED_ROWS = EXPERTS_AT_ONCE = ROUTED_AT_ONCE = 0
SHRINKS_WITH_OUTER = False
TILE = 32  # rows of one product of the weight gradients
LANES = 16  # partial sums of one dot product x·A; vectorises, and fixes the order of the sum
K_BLOCK = 512  # columns of x that one fused loop reads
RANK_BLOCK = 16  # rows of B that one fused loop adds


class Tables(NamedTuple):
    """The rows: sizes of the groups (None when equal), each row's slot (-1 past the last group
    too), and its group, at most the last."""

    group_sizes: jax.Array | None
    row_slots: jax.Array
    group_of_row: jax.Array


class Route(NamedTuple):
    """The token of each row, and each choice's row."""

    token: jax.Array
    position: jax.Array
    tables: Tables


def check(x, w, lora, parts, out_dtype=None):
    """Serves all shapes and floating-point types."""


def tables(group_sizes, row_slots, groups: int) -> Tables:
    """See `differentiable.py`."""
    rows = row_slots.shape[0]
    if group_sizes is None:
        return Tables(None, row_slots, jnp.arange(rows, dtype=jnp.int32) // (rows // groups or 1))
    group = count_below(jnp.cumsum(group_sizes), jnp.arange(rows))
    return Tables(
        group_sizes, jnp.where(group < groups, row_slots, -1), jnp.minimum(group, groups - 1)
    )


def dispatch(x, groups: int, slots: int, group, token_slots, valid, terms=()):
    """See `differentiable.py`."""
    del slots, terms
    found = routing_plan(group, token_slots, groups, valid=valid)
    row_tables = tables(found.group_sizes, found.row_slots, groups)
    return Route(found.token, found.position, row_tables), x[found.token], None


def product(
    x,
    w,
    tables: Tables,
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
    y = grouped_product(x, w, tables.group_sizes, contract)
    if factors:
        y = _add_terms(y, x.shape[0], tables, u, factors, starts, firsts)
    y = y[: x.shape[0]]
    if bias is not None:
        y = with_bias(y, bias, tables)
    y = rounded(y, out_dtype or x.dtype)
    if gate is None:
        return y
    # Of the rounded product, as training has it, which keeps the product for its gradient.
    return gated_columns(y, gate)


def with_bias(y, bias, tables: Tables):
    """The sums of each row plus its group's bias, in the type of the sums."""
    sums = y + jnp.asarray(bias)[tables.group_of_row].astype(y.dtype)
    if tables.group_sizes is None:
        return sums
    inside = jnp.arange(y.shape[0]) < jnp.sum(tables.group_sizes)
    return jnp.where(inside[:, None], sums, y)


def _add_terms(y, rows, tables, u, factors, starts, firsts):
    """Terms cover the same columns, or columns of their own; each stretch is a fused loop."""
    stretches: dict[tuple[int, int], list[int]] = {}
    for term, (start, factor) in enumerate(zip(starts, factors, strict=True)):
        stretches.setdefault((start, factor.shape[3]), []).append(term)

    def add(firsts, piece, u, factors):
        for values, factor, first in zip(u, factors, firsts, strict=True):
            index = matrix_of_row(tables, factor, first)
            mine = has_slot(tables.row_slots, first, factor.shape[0])
            piece = jnp.where(mine[:, None], _expand_rows(piece, values, factor, index), piece)
        return piece

    pieces, reached = [], 0
    for (start, width), terms in sorted(stretches.items()):
        if start > reached:
            pieces.append(lax.slice(y, (0, reached), (rows, start)))
        reached = start + width

        # The slice is inside the branches, where it is fused, not copied.
        def piece(y, start=start, width=width):
            return lax.slice(y, (0, start), (rows, start + width))

        operands = tuple(u[term] for term in terms), tuple(factors[term] for term in terms)
        its = functools.partial(add, [firsts[term] for term in terms])
        pieces.append(
            lax.cond(
                jnp.any(tables.row_slots >= 0),
                lambda y, *operands, piece=piece, add=its: add(piece(y), *operands),
                lambda y, *_, piece=piece: piece(y),
                y,
                *operands,
            )
        )
    if reached < y.shape[1]:
        pieces.append(lax.slice(y, (0, reached), (rows, y.shape[1])))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def shrink(x, tables: Tables, factors, starts, scalings, firsts):
    """See `differentiable.py`; u is in the accumulation type."""
    dtype = jnp.promote_types(jnp.float32, jnp.promote_types(x.dtype, factors[0].dtype))

    def of_term(factor, start, scaling, first):
        columns = lax.slice_in_dim(x, start, start + factor.shape[3], axis=1)
        u = _shrink_rows(columns, factor, matrix_of_row(tables, factor, first), dtype)
        if scaling is None:
            return u
        return u * scaling.reshape(-1)[matrix_of_row(tables, scaling, first)][:, None]

    def every(factors, scalings):
        return tuple(map(of_term, factors, starts, scalings, firsts))

    def none(factors, _):
        return tuple(jnp.zeros((x.shape[0], factor.shape[2]), dtype) for factor in factors)

    return lax.cond(jnp.any(tables.row_slots >= 0), every, none, factors, scalings)


shrink_for_product = shrink  # products take u as it is


def matrix_of_row(tables: Tables, factor, first: int):
    """Where each row finds its matrix once the first two axes, [S, G or 1], are one.

    Rows of other slots, or of none, read some matrix; what they make of it is dropped by a select.
    """
    group = tables.group_of_row if factor.shape[1] > 1 else 0
    slot = jnp.clip(tables.row_slots - first, 0, factor.shape[0] - 1)
    return slot * factor.shape[1] + group


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _shrink_rows(x, factor, index, dtype):
    """x[t] · factor[index[t]]ᵀ for factor `[..., R, K]` flattened to matrices: `[rows, R]`.

    The sum over K keeps `LANES` partial sums in a fixed order, then adds the lanes.
    """
    factor = factor.reshape(-1, *factor.shape[-2:])
    rows, k = x.shape
    rank = factor.shape[1]
    whole = k - k % LANES
    partial = jnp.zeros((rows, rank, LANES), dtype)
    for start in range(0, whole, K_BLOCK):
        for lane in range(start, min(start + K_BLOCK, whole), LANES):
            partial += _multiply_columns(x, factor, index, lane, LANES, dtype)
        # Keeps one fused loop per block: the compiler would otherwise re-read x for each output.
        partial = lax.optimization_barrier(partial)
    total = sum(partial[:, :, lane] for lane in range(LANES))
    for column in range(whole, k):
        total += _multiply_columns(x, factor, index, column, 1, dtype)[:, :, 0]
    return total


def _multiply_columns(x, factor, index, start, width, dtype):
    columns = factor.at[index, :, start : start + width].get(mode="clip")
    return x[:, None, start : start + width].astype(dtype) * columns.astype(dtype)


@functools.partial(jax.jit, inline=True)
def _expand_rows(y, u, factor, index):
    """y[t] + u[t] · factor[index[t]] for factor `[..., R, N]`, added in rank order: `[rows, N]`."""
    factor = factor.reshape(-1, *factor.shape[-2:])
    for start in range(0, factor.shape[1], RANK_BLOCK):
        for rank in range(start, min(start + RANK_BLOCK, factor.shape[1])):
            row = factor.at[index, rank].get(mode="clip").astype(y.dtype)
            y = y + apart(u[:, rank, None] * row)
        y = lax.optimization_barrier(y)
    return y


def outer(lefts, right, spans, tables: Tables, first: int, shape, dtype):
    """See `differentiable.py`."""

    def sums(left, start, width):
        columns = lax.slice_in_dim(right, start, start + width, axis=1)
        return _sums_of_buckets(left, columns, tables, first, shape)

    return joined_terms(sums, lefts, spans, dtype)


def _sums_of_buckets(left, right, tables: Tables, first: int, shape):
    """Σ left[t] ⊗ right[t] over each bucket's rows: [*shape, R, width] in left's type.

    Rows are sorted by bucket and multiplied tile by tile in that order, so the sum's order is
    fixed, no scatter is needed, and a bucket never sees another bucket's rows.
    """
    rows, buckets = left.shape[0], shape[0] * shape[1]
    if rows == 0:
        return jnp.zeros((*shape, left.shape[1], right.shape[1]), left.dtype)
    group = tables.group_of_row if shape[1] > 1 else 0
    keep = has_slot(tables.row_slots, first, shape[0])
    bucket_of_row = jnp.where(keep, (tables.row_slots - first) * shape[1] + group, buckets)
    order = jnp.argsort(bucket_of_row, stable=True)
    sizes = jnp.bincount(bucket_of_row, length=buckets + 1)[:buckets]
    count, bucket, first_row, left_in_bucket = _tiles_of_filled(sizes, rows)
    padded_order = jnp.pad(order, (0, TILE))
    total = jnp.zeros((buckets, left.shape[1], right.shape[1]), left.dtype)

    def tile(i, total):
        row = lax.dynamic_slice_in_dim(padded_order, first_row[i], TILE)
        inside = (jnp.arange(TILE) < left_in_bucket[i])[:, None]
        product = lax.dot_general(
            jnp.where(inside, left[row], 0),
            jnp.where(inside, right[row].astype(left.dtype), 0),
            (((0,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        return total.at[bucket[i]].add(product)

    total = lax.fori_loop(0, count, tile, total)
    return total.reshape(*shape, left.shape[1], right.shape[1])


def _tiles_of_filled(sizes, rows):
    """`tiles` over many mostly empty buckets: at most `rows` of them hold a row."""
    filled = jnp.nonzero(sizes, size=min(rows, sizes.shape[0]), fill_value=sizes.shape[0])[0]
    sizes_of_filled = jnp.where(filled < sizes.shape[0], sizes.at[filled].get(mode="clip"), 0)
    count, group, first_row, left = tiles(sizes_of_filled, rows, TILE)
    return count, filled[group].astype(jnp.int32), first_row, left
