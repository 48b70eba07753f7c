"""What a program of the Hopper attention kernel works on, and how it is loaded."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_sizes import BLOCK, Sizes
from pallas_kernels.paged_attention.tiles import RUN_WORDS, TILE_WORDS


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


def stage_of(sizes: Sizes, step):
    return lax.rem(step, jnp.int32(sizes.stages))


class Loader:
    """The memory warpgroup of a program: fills stages as they are given back."""

    def __init__(self, sizes: Sizes, page_tables, caches, stages, full, empty):
        self.sizes, self.page_tables, self.caches = sizes, page_tables, caches
        self.stages, self.full, self.empty = stages, full, empty

    def load(self, unit: Unit, step):
        s = self.sizes

        def load_round(round_, state):
            pages, step = state
            # Read now, needed for the next round.
            following = self._pages_of_round(unit, round_ + 1)
            for owner in range(s.consumers):
                stage, block = stage_of(s, step + owner), round_ * s.consumers + owner
                for number, piece in enumerate(s.pieces(owner)):

                    @pl.when(step >= s.stages)
                    def _wait(empty=self.empty[number].at[stage]):
                        plgpu.barrier_wait(empty)

                    full = self.full[number].at[stage]
                    self._load(unit, block, pages[owner], stage, piece, full)
            return following, step + s.consumers

        start = self._pages_of_round(unit, unit.first_round), step
        return lax.fori_loop(unit.first_round, unit.end_round, load_round, start)[1]

    def _pages_of_round(self, unit: Unit, round_):
        first = round_ * self.sizes.consumers
        return tuple(self._pages_of(unit, first + i) for i in range(self.sizes.consumers))

    def _pages_of(self, unit: Unit, block):
        """The pages of a block; past the last position, where entries mean nothing, the last."""
        s, request = self.sizes, jnp.maximum(unit.request, 0)
        last = floor(unit.last, s.page)
        starts = [block * BLOCK + number * s.copy for number in range(BLOCK // s.copy)]
        return tuple(
            self.page_tables[request, jnp.minimum(floor(start, s.page), last)] for start in starts
        )

    def _load(self, unit: Unit, block, pages, stage, piece, full):
        s = self.sizes
        head = floor(unit.part, s.units_of_head)
        for number, page in enumerate(pages):
            inside = lax.rem(block * BLOCK + number * s.copy, jnp.int32(s.page))
            first = pl.multiple_of(page * s.page + inside, s.copy)
            for cache, i in piece:
                width = s.widths[cache]
                plgpu.copy_gmem_to_smem(
                    self.caches[cache].at[pl.ds(first, s.copy), head, pl.ds(i * width, width)],
                    self.stages[cache].at[stage, i, pl.ds(number * s.copy, s.copy)],
                    full,
                )


def floor(number, size: int):
    return lax.div(number, jnp.int32(size))
