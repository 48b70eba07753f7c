"""Which tokens of a flat batch one unit of an attention kernel works on."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE_WORDS = 4
RUN_WORDS = TILE_WORDS + 2


class TokenTiles(NamedTuple):
    """Tiles of consecutive tokens at consecutive positions of one request.

    Attributes:
      count: int32 [1], how many there are.
      words: int32 [tokens x TILE_WORDS], of each tile: its first token, how many, their request (-1
        for padding), and the first one's position.
    """

    count: jax.Array
    words: jax.Array


def token_tiles(view, height: int) -> TokenTiles:
    """Cuts a batch into tiles of at most `height` tokens; any order of tokens is allowed.

    The same for all layers of a step, so that the compiler makes it once.
    """
    tokens = view.request.shape[0]
    row, starts = _starts(view, height)
    tile = jnp.cumsum(starts, dtype=jnp.int32) - 1
    size = jnp.zeros(tokens, jnp.int32).at[tile].add(1)
    first = jnp.zeros(tokens, jnp.int32).at[jnp.where(starts, tile, tokens)].set(row, mode="drop")
    words = jnp.stack([first, size, view.request[first], view.positions[first]], axis=1)
    return TokenTiles(tile[-1:] + 1, words.reshape(-1))


def split_runs(tiles: TokenTiles, split: int, window: int | None, most: int, size: int):
    """Cuts what tiles see of their requests into runs of splits, at most `size` of them.

    Those past the count have no splits: who has but one need not know the count. A split is
    [n * split, (n + 1) * split) for any n. Runs are as long as they must be, all but a tile's last
    one equally.

    Args:
      most: how many splits a tile sees at most: positions past these, and past a page table, have
        no runs.
      size: not less than the number of tokens.

    Returns:
      TokenTiles of runs, with RUN_WORDS each: those of the tile, the first split and the end.
    """
    words = tiles.words.reshape(-1, TILE_WORDS)
    _, tokens, request, position = words.T
    first = jnp.zeros_like(position)
    if window is not None:
        first = lax.div(jnp.maximum(position - window + 1, 0), jnp.int32(split))
    end = jnp.minimum(lax.div(position + tokens - 1, jnp.int32(split)) + 1, first + most)
    used = (jnp.arange(len(words)) < tiles.count) & (request >= 0)
    splits = jnp.where(used, end - first, 0)
    lengths = jnp.arange(1, most + 1, dtype=jnp.int32)
    too_short = _cut(splits, lengths[:, None]).sum(axis=1) > size
    length = 1 + too_short.sum(dtype=jnp.int32)
    ends = jnp.cumsum(_cut(splits, length), dtype=jnp.int32)
    run = jnp.arange(size, dtype=jnp.int32)
    tile = jnp.minimum((run[:, None] >= ends).sum(axis=1), len(words) - 1)
    before = jnp.where(tile > 0, ends[tile - 1], 0)
    start = first[tile] + (run - before) * length
    stop = jnp.where(run < ends[-1], jnp.minimum(start + length, end[tile]), start)
    runs = jnp.concatenate([words[tile], start[:, None], stop[:, None]], axis=1)
    return TokenTiles(ends[-1:], runs.reshape(-1))


def _cut(number, length):
    """In how many pieces."""
    return lax.div(number + length - 1, jnp.broadcast_to(length, jnp.shape(number + length)))


def first_of_tile(view, height: int):
    """int32 [T]: the first token of each token's tile."""
    row, starts = _starts(view, height)
    return lax.cummax(jnp.where(starts, row, 0))


def _starts(view, height: int):
    """The numbers of all tokens, and which begin a tile."""
    row = jnp.arange(view.request.shape[0], dtype=jnp.int32)
    same = (view.request == jnp.roll(view.request, 1)) & (row > 0)
    same &= (view.positions == jnp.roll(view.positions, 1) + 1) | (view.request < 0)
    begin = lax.cummax(jnp.where(same, 0, row))
    return row, lax.rem(row - begin, jnp.int32(height)) == 0
