"""What a program of the Hopper attention kernel works on, and how it is loaded."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_sizes import BLOCK, Sizes
from pallas_kernels.paged_attention.tiles import RUN_WORDS, TILE_WORDS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unit:
    """Some tokens in a row and a part of the heads, over some splits of what they see.

    A round is one block for each consumer. Splits, if there are any, are made of rounds.
    """

    part: jax.Array
    token: jax.Array
    tokens: jax.Array
    request: jax.Array
    position: jax.Array
    first: jax.Array  # the first position that its first token sees
    first_split: jax.Array
    end_split: jax.Array
    first_round: jax.Array
    end_round: jax.Array

    @property
    def has_rounds(self):
        """Not so for padding."""
        return self.first_round < self.end_round

    @property
    def last(self):
        """The position of the last token."""
        return self.position + self.tokens - 1

    def sees_one_split(self, sizes: Sizes):
        """Whether the tokens see no other split than one."""
        return floor(self.first, sizes.split) == floor(self.last, sizes.split)


def unit_at(sizes: Sizes, words, index) -> Unit:
    """The unit of this number; `words` are those of tiles, or of runs if sequences are spread."""
    s = sizes
    tile = lax.div(index, jnp.int32(s.parts))
    each = RUN_WORDS if s.spread else TILE_WORDS
    token, tokens, request, position, *run = (words[tile * each + word] for word in range(each))
    first = jnp.int32(0) if s.window is None else jnp.maximum(position - s.window + 1, 0)
    end = position + tokens
    first_split, end_split = run or (floor(first, s.split), floor(end - 1, s.split) + 1)
    first_round, end_round = floor(first, s.round_size), floor(end - 1, s.round_size) + 1
    if s.spread:
        first_round = jnp.maximum(first_round, first_split * s.rounds)
        end_round = jnp.minimum(end_round, end_split * s.rounds)
    return Unit(
        part=lax.rem(index, jnp.int32(s.parts)),
        token=token,
        tokens=tokens,
        request=request,
        position=position,
        first=first,
        first_split=first_split,
        end_split=jnp.where(request >= 0, end_split, first_split),
        first_round=first_round,
        end_round=jnp.where(request >= 0, end_round, 0),
    )


def tile_of(sizes: Sizes, unit: Unit, number: int) -> Unit:
    """One of a unit's tiles, which may have no tokens. Its rounds are the unit's."""
    before = number * sizes.tile
    return dataclasses.replace(
        unit,
        token=unit.token + before,
        tokens=jnp.clip(unit.tokens - before, 0, sizes.tile),
        position=unit.position + before,
    )


def stage_of(sizes: Sizes, step, owner: int = 0):
    """Where a consumer's block is, of the round that begins with this step."""
    return lax.rem(step + owner, jnp.int32(sizes.stages))


class Place(NamedTuple):
    """A row of a page of the cache.

    Not yet one number: who computes with an entry of a page table waits until it has come.
    """

    page: jax.Array
    row: jax.Array


class Loader:
    """Fills stages."""

    def __init__(self, sizes: Sizes, page_tables, caches, stages, full):
        self.sizes, self.page_tables, self.caches = sizes, page_tables, caches
        self.stages, self.full = stages, full

    def load(self, unit: Unit, step, empty):
        """Loads a unit, a stage when it has been given back: for a warpgroup that does no more."""
        s = self.sizes

        head = floor(unit.part, s.units_of_head)

        def load_round(round_, state):
            places, step = state
            # Read now, needed for the next round.
            following = self.places_of_round(unit, round_ + 1)
            for owner in range(s.consumers):
                stage = stage_of(s, step, owner)
                for number in range(len(self.full)):

                    @pl.when(step >= s.stages)
                    def _wait(empty=empty[number].at[stage]):
                        plgpu.barrier_wait(empty)

                    self.load_piece(places, head, owner, number, stage)
            return following, step + s.consumers

        start = self.places_of_round(unit, unit.first_round), step
        return lax.fori_loop(unit.first_round, unit.end_round, load_round, start)[1]

    def places_of_round(self, unit: Unit, round_):
        """Of each consumer's block, where in the cache each copy begins."""
        first = round_ * self.sizes.consumers
        return tuple(self._places_of(unit, first + i) for i in range(self.sizes.consumers))

    def _places_of(self, unit: Unit, block):
        """Past the last position, where a table's entries mean nothing, places in the last page."""
        s, request = self.sizes, jnp.maximum(unit.request, 0)
        last = floor(unit.last, s.page)

        def place_of(start):
            page = self.page_tables[request, jnp.minimum(floor(start, s.page), last)]
            return Place(page, lax.rem(start, jnp.int32(s.page)))

        return tuple(place_of(block * BLOCK + copy * s.copy) for copy in range(BLOCK // s.copy))

    def load_piece(self, places, head, owner, number, stage):
        """The piece of this number of a consumer's block; `places` are those of the round."""
        s = self.sizes
        for copy, place in enumerate(places[owner]):
            row = place.page * s.page + place.row
            of_cache = pl.ds(pl.multiple_of(row, s.copy), s.copy), head
            of_stage = pl.ds(copy * s.copy, s.copy)
            for cache, i in s.pieces(owner)[number]:
                width = s.widths[cache]
                plgpu.copy_gmem_to_smem(
                    self.caches[cache].at[*of_cache, pl.ds(i * width, width)],
                    self.stages[cache].at[stage, i, of_stage],
                    self.full[number].at[stage],
                )


def floor(number, size: int):
    return lax.div(number, jnp.int32(size))
