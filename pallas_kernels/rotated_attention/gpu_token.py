"""Where a token is, and the keys and values that it sees."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.rolled import rolled
from pallas_kernels.paged_attention.gpu_sizes import BLOCK, Sizes
from pallas_kernels.paged_attention.gpu_units import floor


class Token:
    """One of a view, from the kernel's references.

    Attributes:
      position: its own, or the last one that the table has a page for.
      last_block, splits: that of its position, and how many it sees; -1 and 0 of padding.
      new: of each token of the step its position, and whether it is cached before this one
        attends: the request's tokens up to this one, within the page table.
      first_new_block: what is cached before this step is before it.
    """

    def __init__(self, s: Sizes, view, number):
        self.s, self.page_tables = s, view.page_tables
        positions = view.page_tables.shape[1] * s.page
        request, position = view.request[number], view.positions[number]
        self.request = jnp.maximum(request, 0)
        self.position = jnp.minimum(position, positions - 1)
        self.last_block = jnp.where(request >= 0, floor(self.position, BLOCK), -1)
        self.splits = floor(self.last_block + s.rounds, s.rounds)
        self.new, first = [], self.position
        for other in range(s.tokens):
            of, place = view.request[other], view.positions[other]
            is_its = (request >= 0) & (of == request) & (place < positions) & (place <= position)
            self.new.append((place, is_its))
            first = jnp.minimum(first, jnp.where(is_its, place, first))
        self.first_new_block = floor(first, BLOCK)

    def row_of(self, position):
        """Where a position is in the cache; of those past the token's page, some row of that."""
        page_size = self.s.page
        column = jnp.minimum(floor(position, page_size), floor(self.position, page_size))
        page = self.page_tables[self.request, column]
        return page * page_size + lax.rem(position, jnp.int32(page_size))

    def splits_from(self, first, step: int):
        """How many of its splits are every so many from the first on."""
        return lax.div(jnp.maximum(self.splits - first, 0) + (step - 1), jnp.int32(step))

    def blocks_of(self, split):
        """How many blocks of a split it sees."""
        return jnp.minimum(self.last_block + 1 - split * self.s.rounds, self.s.rounds)

    def blocks_before(self, split):
        """How many of a split's first blocks have nothing of this step."""
        blocks = self.first_new_block - split * self.s.rounds
        return jnp.minimum(jnp.maximum(blocks, 0), self.blocks_of(split))

    def last_seen(self, split, block):
        """The last position of a split's block that it sees, counted from the block's first."""
        return self.position - (split * self.s.rounds + block) * BLOCK


class Blocks(NamedTuple):
    """Keys, or values, of a split's blocks, and how they come to shared memory.

    Attributes:
      part: the head of the cache. cache: [positions of all pages, heads, columns].
      stage: [blocks, 64, columns]. full: a barrier for each block. empty: that of all.
    """

    s: Sizes
    token: Token
    part: jax.Array
    cache: jax.Array
    stage: jax.Array
    full: jax.Array
    empty: jax.Array

    def load_before_step(self, split):
        """Loads the blocks of a split that have nothing of this step."""
        count = self.token.blocks_before(split)

        def load(number):
            pl.when(number < count)(lambda: self.load(split, number))

        rolled(0, self.s.rounds, split, load)

    def load(self, split, number):
        s, block = self.s, split * self.s.rounds + number
        for copy in range(BLOCK // s.copy):
            first = pl.multiple_of(self.token.row_of(block * BLOCK + copy * s.copy), s.copy)
            plgpu.copy_gmem_to_smem(
                self.cache.at[pl.ds(first, s.copy), self.part],
                self.stage.at[number, pl.ds(copy * s.copy, s.copy)],
                self.full.at[number],
            )
