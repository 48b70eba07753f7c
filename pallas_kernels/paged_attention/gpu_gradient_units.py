"""What the two Hopper kernels of attention's gradient share: static sizes, and units of work.

Tokens are laid out in tiles of `TILE` places, each of one sequence, from its position 0 on; places
without a token hold zeros. A unit is a tile and a head (or heads); each of two consumer warpgroups
has 64 of the tile's rows.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.machine import PROGRAMS, SHARED_MEMORY

ROWS = 64  # of a consumer, and of a step
CONSUMERS = 2
TILE = CONSUMERS * ROWS
MOST_STAGES = 4
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
WORDS = 3  # of a tile
COLUMNS = 64  # of a gradient of keys or values, float32, stored at once


@dataclasses.dataclass(frozen=True)
class GradientSizes:
    """Static sizes of both kernels.

    Attributes:
      places: those of all tiles. width, v_width: of keys and of values.
      window: how many positions a token sees, its own included.
      sinks: whether each head has a score that no position has.
    """

    places: int
    heads: int
    kv_heads: int
    width: int
    v_width: int
    window: int | None
    sinks: bool
    scale: float
    interpreted: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def heads_of_unit(self) -> int:
        """Query heads whose gradients a unit of keys adds up.

        Few, so that the longest unit is a small part of a sequence's work; and the same whatever
        the batch is, as this decides the order of sums.
        """
        return 1 if self.group % 2 else 2

    @property
    def parts(self) -> int:
        """Sums that one head of keys is made of."""
        return self.group // self.heads_of_unit

    @property
    def has_room(self) -> bool:
        """Whether registers have room for two blocks of products beside a unit's sums of keys."""
        return self.width + self.v_width <= 256

    @property
    def query_stages(self) -> int:
        """Three at least: products with a block begin before the one before it is given back."""
        return self._stages(0)

    @property
    def key_stages(self) -> int:
        return self._stages(CONSUMERS * ROWS * COLUMNS * 4)

    def _stages(self, beside: int) -> int:
        """Pairs of blocks that fit beside a tile's own, and so many bytes more."""
        row = 2 * (self.width + self.v_width)
        fixed, pair = TILE * row + beside, ROWS * row + 2 * 4 * ROWS
        return min(MOST_STAGES, (SHARED_MEMORY - fixed) // pair)

    def programs(self, units_of_tile: int) -> int:
        return min(PROGRAMS, self.places // TILE * units_of_tile)

    def name(self, what: str) -> str:
        heads = f"h{self.heads}_g{self.kv_heads}_k{self.width}_v{self.v_width}"
        return f"attention_gradients_{what}_{heads}"


class TileTable(NamedTuple):
    """The tiles that hold tokens, those with the most work first.

    Attributes:
      count: int32 [1]. words: int32 [tiles x WORDS], of each its first place, which tile of its
        sequence it is, and how many blocks of 64 that sequence has.
    """

    count: jax.Array
    words: jax.Array


def tile_table(number, blocks, work) -> TileTable:
    """number, blocks, work: [tiles]; the number is -1 where a tile holds nothing."""
    index = jnp.arange(number.shape[0], dtype=jnp.int32)
    work = jnp.where(number < 0, -1, work)
    more = work > work[:, None]
    rank = jnp.sum(more | ((work == work[:, None]) & (index < index[:, None])), axis=1)
    words = jnp.stack([index * TILE, number, blocks], axis=1).astype(jnp.int32)
    words = jnp.zeros_like(words).at[rank].set(words)
    return TileTable(jnp.sum(number >= 0, dtype=jnp.int32)[None], words.reshape(-1))


@dataclasses.dataclass(frozen=True)
class Unit:
    """A tile and its head (or part of the heads) `part`."""

    place: jax.Array
    number: jax.Array
    blocks: jax.Array
    part: jax.Array


class Units:
    """The units of one program.

    They are dealt in rounds, to and fro: with the longest first, each program's sum is about equal.
    """

    def __init__(self, count, words, units_of_tile: int, programs: int):
        self.words, self.units_of_tile, self.programs = words, units_of_tile, programs
        self.program = lax.axis_index("program")
        units = count[0] * units_of_tile
        rounds = lax.div(units, jnp.int32(programs))
        self.mine = rounds + (self._index(rounds) < units).astype(jnp.int32)

    def _index(self, i):
        back = self.programs - 1 - self.program
        return i * self.programs + jnp.where(lax.rem(i, jnp.int32(2)) == 0, self.program, back)

    def at(self, i) -> Unit:
        index = self._index(i)
        tile = lax.div(index, jnp.int32(self.units_of_tile))
        place, number, blocks = (self.words[tile * WORDS + word] for word in range(WORDS))
        part = lax.rem(index, jnp.int32(self.units_of_tile))
        return Unit(pl.multiple_of(place, TILE), number, blocks, part)


def left_side(value, scratch, *place):
    """The left side of a product: a value in registers, or where the interpreter can read it."""
    if scratch is None:
        return value
    scratch[place] = value
    return scratch.at[place]


def positions(first, axis: int, shape):
    """first, first + 1 … along an axis of a product's result."""
    return first + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def visible(query, key, window: int | None):
    """Where a query sees a key, by position."""
    near = query >= key
    return near if window is None else near & (query - key < window)
