"""The base product of `grouped_lora_matmul` in plain JAX: rows times their group's weight.

Rows are taken in tiles whose heights come from a short list, never as many as there happen to be:
a bare dot chooses its code, and with it the order of its sums, by its number of rows. On the CPU
the forward product x · wᵀ gives the same bits for every height that is a multiple of 8 (NOTES.md),
so the last tile of a group can be as low as its rows need; everywhere else one height is used.

Tiles run in row order and write their full height. What a tile writes past its group's end is
overwritten by the next group's tile, and by zeros past the last group's end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

HEIGHTS = (16, 32, 48, 64, 80, 96)
ONE_HEIGHT = (32,)


def _heights(contract: int) -> tuple[int, ...]:
    """Tile heights, ascending, that give a row the same bits."""
    return HEIGHTS if contract == 2 and jax.default_backend() == "cpu" else ONE_HEIGHT


def grouped_product(x, w, group_sizes, contract):
    """x[t] times its group's weight, contracted over w's axis `contract` (2 forward, 1 backward).

    Args:
      x: `[M, K]`. w: `[G, N, K]` (or `[G, K, N]` for contract 1). group_sizes: int32 `[G]`, or
        None when the groups have equally many rows.

    Returns:
      `[M or more, N]` in the accumulation dtype; rows past the last group are zero.
    """
    if group_sizes is None:
        return _equal_groups(x, w, contract)
    heights = _heights(contract)
    tallest, rows = heights[-1], x.shape[0]
    count, group, first_row, left = tiles(group_sizes, rows, tallest)
    which = jnp.minimum((left - 1) // heights[0], len(heights) - 1)
    x = jnp.pad(x, ((0, tallest), (0, 0)))
    y = jnp.zeros((rows + tallest, w.shape[3 - contract]), _accumulator(x, w))

    def write_tile(i, height, y):
        block = lax.dynamic_slice_in_dim(x, first_row[i], height)
        weight = lax.dynamic_index_in_dim(w, group[i], keepdims=False)
        product = _product(block, weight, contract)
        return lax.dynamic_update_slice_in_dim(y, product, first_row[i], axis=0)

    def tile(i, y):
        branches = [lambda y, height=height: write_tile(i, height, y) for height in heights]
        return lax.switch(which[i], branches, y)

    y = lax.fori_loop(0, count, tile, y)
    past_the_end = jnp.zeros((tallest, y.shape[1]), y.dtype)
    return lax.dynamic_update_slice_in_dim(y, past_the_end, jnp.sum(group_sizes), axis=0)


def tiles(group_sizes, rows, height):
    """Tiles of up to `height` rows, in row order.

    Returns:
      Their number; and for each the group, the first row, and the group's rows from there on.
      Arrays are as long as there can be tiles; entries past the number mean nothing.
    """
    tiles_of_group = -(-group_sizes // height)
    ends = jnp.cumsum(tiles_of_group)
    tile = jnp.arange(-(-rows // height) + group_sizes.shape[0], dtype=jnp.int32)
    group = jnp.minimum(count_below(ends, tile), group_sizes.shape[0] - 1)
    offset = (tile - (ends - tiles_of_group)[group]) * height
    first_row = (jnp.cumsum(group_sizes) - group_sizes)[group] + offset
    return ends[-1], group, first_row, group_sizes[group] - offset


def count_below(ends, values):
    """How many of the sorted `ends` are at or below each value: its group."""
    return jnp.sum(ends[None, :] <= values[:, None], axis=1, dtype=jnp.int32)


def _equal_groups(x, w, contract):
    """Groups of the same, static number of rows: tiles of all groups at once."""
    groups, heights = w.shape[0], _heights(contract)
    rows, tallest = x.shape[0] // groups, heights[-1]
    x = x.reshape(groups, rows, x.shape[1])
    whole = rows - rows % tallest
    blocks = [] if rows else [jnp.zeros((groups, 0, w.shape[3 - contract]), _accumulator(x, w))]
    if whole:
        block = x[:, :whole].reshape(groups, -1, tallest, x.shape[2])
        y = lax.map(lambda block: _product(block, w, contract), jnp.swapaxes(block, 0, 1))
        blocks.append(jnp.swapaxes(y, 0, 1).reshape(groups, whole, -1))
    if rows > whole:
        height = next(height for height in heights if height >= rows - whole)
        block = jnp.pad(x[:, whole:], ((0, 0), (0, height - rows + whole), (0, 0)))
        blocks.append(_product(block, w, contract)[:, : rows - whole])
    y = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
    return y.reshape(groups * rows, y.shape[-1])


def _product(block, weight, contract):
    """[(G,) height, K] times [(G,) N, K] (contract 2) or [(G,) K, N] (contract 1)."""
    columns = -contract  # the axis of them in the weight
    if weight.shape[columns] == 1:
        # From JAX 0.12 on, one column in a loop is a sum of another order than outside of one.
        weight = jnp.concatenate([weight, weight], axis=columns)
        return _product(block, weight, contract)[..., :1]
    operand = jnp.promote_types(block.dtype, weight.dtype)
    batch = tuple(range(block.ndim - 2))
    return lax.dot_general(
        block.astype(operand),
        weight.astype(operand),
        (((block.ndim - 1,), (contract - 3 + weight.ndim,)), (batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=_accumulator(block, weight),
    )


def _accumulator(x, w):
    return jnp.promote_types(jnp.float32, jnp.promote_types(x.dtype, w.dtype))
