"""`grouped_lora_matmul` in plain JAX: the CPU default, and the fallback on every platform.

The base product is in `base_product.py`. The low-rank product is elementwise: each row reads its
own A and B in place, a few rank rows or columns at a time, so nothing of size rows x rank x width
is stored, the cost does not grow with slots or groups, and a row never touches another adapter's
values.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_lora_matmul.base_product import (
    count_below,
    grouped_product,
    tiles,
)

TILE = 32  # rows of one product of the weight gradients
LANES = 16  # partial sums of one dot product x·A; vectorises, and fixes the order of the sum
K_BLOCK = 512  # columns of x that one fused loop reads
RANK_BLOCK = 16  # rows of B that one fused loop adds


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_lora_matmul(parts, x, w, group_sizes, row_slots, lora):
    """See `api.grouped_lora_matmul`; `parts` and `lora` are complete here."""
    return _forward(parts, x, w, group_sizes, row_slots, lora)[0]


def _forward(parts, x, w, group_sizes, row_slots, lora):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    x, w, group_sizes, row_slots, lora = jax.tree.map(
        jnp.asarray, (x, w, group_sizes, row_slots, lora)
    )
    y = grouped_product(x, w, group_sizes, contract=2)
    group_of_row = _group_of_row(group_sizes, w.shape[0], x.shape[0])
    pieces, start = [], 0
    for width, pair in zip(parts, lora, strict=True):
        piece = functools.partial(_piece, rows=x.shape[0], start=start, width=width)
        start += width
        if pair is None:
            pieces.append(piece(y))
            continue
        index = _pair_index(pair, row_slots, group_of_row, w.shape[0])
        # The slice is inside the branches, where it is fused, not copied.
        pieces.append(
            lax.cond(
                jnp.any(index.adapted),
                lambda y, *delta, piece=piece: _add_delta(piece(y), *delta),
                lambda y, *_, piece=piece: piece(y),
                *(y, x, pair, index),
            )
        )
    y = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
    return y.astype(x.dtype), (x, w, group_sizes, row_slots, lora)


def _piece(y, rows, start, width):
    return lax.slice(y, (0, start), (rows, start + width))


def _add_delta(y, x, pair, index):
    u = shrink(x, pair.a, index.a, y.dtype) * index.scaling[:, None]
    return jnp.where(index.adapted[:, None], expand(y, u, pair.b, index.b), y)


def _backward(parts, saved, dy):
    x, w, group_sizes, row_slots, lora = saved
    group_of_row = _group_of_row(group_sizes, w.shape[0], x.shape[0])
    in_group = (group_of_row < w.shape[0])[:, None]
    dy = jnp.where(in_group, dy, 0)
    dx = grouped_product(dy, w, group_sizes, contract=1)[: x.shape[0]]
    dlora, start = [], 0
    for width, pair in zip(parts, lora, strict=True):
        dy_part = lax.slice_in_dim(dy, start, start + width, axis=1)
        start += width
        if pair is None:
            dlora.append(None)
            continue
        index = _pair_index(pair, row_slots, group_of_row, w.shape[0])
        adapted = index.adapted[:, None]
        scaling = index.scaling[:, None]
        v = shrink(dy_part, pair.b, index.b, dx.dtype)
        du = v * scaling
        dx = jnp.where(adapted, expand(dx, du, pair.a, index.a), dx)
        u = shrink(x, pair.a, index.a, dx.dtype)
        da = _bucket_outer(du, x, index.a, index.adapted, pair.a)
        db = _bucket_outer(u * scaling, dy_part, index.b, index.adapted, pair.b)
        dscaling = jax.ops.segment_sum(
            jnp.where(index.adapted, jnp.sum(u * v, axis=1), 0),
            index.s,
            num_segments=pair.scaling.size,
        )
        dlora.append(type(pair)(da, db, dscaling.reshape(pair.scaling.shape)))
    return dx.astype(x.dtype), None, None, None, tuple(dlora)


grouped_lora_matmul.defvjp(_forward, _backward)


def _group_of_row(group_sizes, groups, rows):
    """int32 [rows]; the number of groups for rows past the last group."""
    if group_sizes is None:
        return jnp.arange(rows, dtype=jnp.int32) // (rows // groups)
    return count_below(jnp.cumsum(group_sizes), jnp.arange(rows))


class _PairIndex(NamedTuple):
    """Where each row finds its A, B and scaling in a pair whose first two axes are flattened."""

    a: jax.Array
    b: jax.Array
    s: jax.Array
    scaling: jax.Array
    adapted: jax.Array


def _pair_index(pair, row_slots, group_of_row, groups):
    last = max(array.shape[1] for array in pair) - 1
    # Base-only rows and rows past the groups read slot 0 or the last group; their result is
    # dropped by `adapted`, a select.
    slot, group = jnp.maximum(row_slots, 0), jnp.minimum(group_of_row, last)
    a, b, s = (slot * array.shape[1] + (group if array.shape[1] > 1 else 0) for array in pair)
    adapted = (row_slots >= 0) & (group_of_row < groups)
    return _PairIndex(a, b, s, pair.scaling.reshape(-1)[s], adapted)


def shrink(x, factor, index, dtype):
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


def expand(y, u, factor, index):
    """y[t] + u[t] · factor[index[t]] for factor `[..., R, N]`, added in rank order: `[rows, N]`."""
    factor = factor.reshape(-1, *factor.shape[-2:])
    for start in range(0, factor.shape[1], RANK_BLOCK):
        for rank in range(start, min(start + RANK_BLOCK, factor.shape[1])):
            row = factor.at[index, rank].get(mode="clip").astype(y.dtype)
            y = y + u[:, rank, None] * row
        y = lax.optimization_barrier(y)
    return y


def _bucket_outer(left, right, index, keep, like):
    """Sum of the outer products left[t] ⊗ right[t] over the rows of each bucket.

    Rows are sorted by bucket and multiplied tile by tile in that order, so the sum's order is
    fixed, no scatter is needed, and a bucket never sees another bucket's rows.

    Args:
      left: [rows, R]. right: [rows, K]. index: bucket of each row. keep: rows that count.
      like: [S, G or 1, R, K], the parameter whose gradient this is.
    """
    rows = left.shape[0]
    buckets = like.shape[0] * like.shape[1]
    order = jnp.argsort(jnp.where(keep, index, buckets), stable=True)
    sizes = jnp.bincount(jnp.where(keep, index, buckets), length=buckets + 1)[:buckets]
    count, bucket, first_row, left_in_bucket = _tiles_of_filled(sizes, rows)
    padded_order = jnp.pad(order, (0, TILE))
    total = jnp.zeros((buckets, *like.shape[2:]), left.dtype)

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
    return total.reshape(like.shape).astype(like.dtype)


def _tiles_of_filled(sizes, rows):
    """`tiles` over many mostly empty buckets: at most `rows` of them hold a row."""
    filled = jnp.nonzero(sizes, size=min(rows, sizes.shape[0]), fill_value=sizes.shape[0])[0]
    sizes_of_filled = jnp.where(filled < sizes.shape[0], sizes.at[filled].get(mode="clip"), 0)
    count, group, first_row, left = tiles(sizes_of_filled, rows, TILE)
    return count, filled[group].astype(jnp.int32), first_row, left
