"""Which tokens of a flat batch one unit of an attention kernel works on."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE_WORDS = 4


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
    row = jnp.arange(tokens, dtype=jnp.int32)
    same = (view.request == jnp.roll(view.request, 1)) & (row > 0)
    same &= (view.positions == jnp.roll(view.positions, 1) + 1) | (view.request < 0)
    begin = lax.cummax(jnp.where(same, 0, row))
    starts = lax.rem(row - begin, jnp.int32(height)) == 0
    tile = jnp.cumsum(starts, dtype=jnp.int32) - 1
    size = jnp.zeros(tokens, jnp.int32).at[tile].add(1)
    first = jnp.zeros(tokens, jnp.int32).at[jnp.where(starts, tile, tokens)].set(row, mode="drop")
    words = jnp.stack([first, size, view.request[first], view.positions[first]], axis=1)
    return TokenTiles(tile[-1:] + 1, words.reshape(-1))
