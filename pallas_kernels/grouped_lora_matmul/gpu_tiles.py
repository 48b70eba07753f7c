"""How the warpgroups of a product's program learn their tiles, and the runs in them.

The memory warpgroup reads the table of tiles and copies what it says of a tile, with the place and
the run end of each of its rows, to shared memory, where all warpgroups read it. So does the bias of
its features come there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_product_layout import ProductLayout
from pallas_kernels.grouped_lora_matmul.gpu_rows import group_of, slot_of
from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILE_WORDS, TILES
from pallas_kernels.grouped_lora_matmul.gpu_tile_table import equal_tile


class Tile(NamedTuple):
    """A tile of the table, and the feature it starts at.

    Attributes:
      slot: where in shared memory its words are.
      number: of its rows in the table.
      group, row, rows: whose rows, the first, and how many.
      k_steps: stages of the K loop; 0 for rows past the last group, which become zeros.
      feature: the first of the tile's features.
      skipped: of a part of a tile, the rows before its first.
      place: of its first row, where every row is a tile or u is made.
    """

    slot: jax.Array
    number: jax.Array
    group: jax.Array
    row: jax.Array
    rows: jax.Array
    k_steps: jax.Array
    feature: jax.Array
    skipped: jax.Array
    place: jax.Array | None


class TileFeed:
    """The tiles of one program: its i-th is tile `program + i * programs` of all.

    Args:
      count: how many it has; those from there on are the first ones again.
      words: the table, or each row's place where every row is a tile, which may be in shared
        memory; None of equal groups.
      places, run_ends: those of all rows; None without adapters.
      in_memory: int32 [TILES, words of a tile] in shared memory. full, empty: its barriers.
      bias: that of all groups, [groups of all layers, N]. bias_in_memory: [TILES, features of a
        tile, in whole blocks, part by part] in shared memory. None where there is none.
    """

    def __init__(
        self,
        layout: ProductLayout,
        program,
        count,
        words,
        places,
        run_ends,
        in_memory,
        full,
        empty,
        bias=None,
        bias_in_memory=None,
    ):
        self.layout, self.schedule = layout, layout.schedule
        self.program, self.count = program, count
        self.words, self.places, self.run_ends = words, places, run_ends
        self.in_memory, self.full, self.empty = in_memory, full, empty
        self.bias, self.bias_in_memory = bias, bias_in_memory

    def number(self, i):
        """The number in the table of a program's tile, and its slice of features."""
        # A few tiles take a slice after each other, so that they read its W at the same time.
        together, slices = self.schedule.together, self.layout.feature_tiles
        if self.layout.in_place:
            i -= jnp.where(i < self.count, 0, self.count)
        index = self.program + i * self.schedule.programs
        some = lax.div(index, jnp.int32(together * slices))
        place = lax.rem(index, jnp.int32(together * slices))
        return some * together + lax.rem(place, jnp.int32(together)), lax.div(
            place, jnp.int32(together)
        )

    def equal_tile(self, tile):
        layout = self.layout
        return equal_tile(layout.rows, layout.groups, self.schedule.rows_of_tile, tile)

    def tile_of(self, i, number, words, slice_of, place) -> Tile:
        layout = self.layout
        row, rows, group = words
        k_steps = jnp.where(group < layout.groups, layout.k_steps, 0)
        group = jnp.minimum(group, layout.groups - 1)
        feature = layout.slices.first_feature(slice_of)
        slot = lax.rem(i, jnp.int32(TILES))
        return Tile(slot, number, group, row, rows, k_steps, feature, jnp.int32(0), place)

    def read(self, i) -> Tile:
        """From the table; the words past its end are read, early, but nothing uses them."""
        (number, slice_of), place = self.number(i), None
        tile = number
        if self.layout.equal:
            words = self.equal_tile(tile)
        elif self.layout.single_rows:
            tile = jnp.minimum(tile, self.layout.rows - 1)
            # Its group and its slot, in one load.
            place = self.words[tile]
            words = tile, jnp.int32(1), group_of(place)
        else:
            tile = jnp.minimum(tile, self.words.shape[0] // TILE_WORDS - 1)
            words = [self.words[tile * TILE_WORDS + word] for word in range(3)]
        if self.layout.inner and place is None:
            place = self.places[jnp.minimum(words[0], self.layout.rows - 1)]
        return self.tile_of(jnp.int32(i), number, words, slice_of, place)

    def load(self, tile: Tile, i, layer):
        """Brings a tile's words, those of its rows, and its bias, to the consumers, if they need
        any."""
        if not self.layout.word_copies():
            return
        slot = tile.slot

        @pl.when(i >= TILES)
        def _wait():
            plgpu.barrier_wait(self.empty.at[slot])

        number, _ = self.number(i)
        # A copy begins at a multiple of its unit, at or before the tile's first row.
        first = tile.row - lax.rem(tile.row, jnp.int32(TILE_WORDS))
        count = self.schedule.heights[-1] + TILE_WORDS
        copies = []
        if self.layout.single_rows:
            if not self.layout.chosen:
                copies.append((self.words, first, count, self.layout.place))
        else:
            if not self.layout.equal:
                copies.append((self.words, number * TILE_WORDS, TILE_WORDS, 0))
            if self.layout.terms:
                copies.append((self.places, first, count, self.layout.place))
                copies.append((self.run_ends, first, count, self.layout.run_end))
        for source, first, count, destination in copies:
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(first, count)],
                self.in_memory.at[slot, pl.ds(destination, count)],
                self.full.at[slot],
            )
        if self.layout.biased:
            self.load_bias(tile, layer)

    def load_bias(self, tile: Tile, layer):
        """Brings the bias of a tile's features: past the last of all zeros, as of W."""
        layout, features = self.layout, 64 * self.layout.feature_blocks
        group = layer * layout.biases_of_layer + tile.group
        for part in range(layout.parts):
            plgpu.copy_gmem_to_smem(
                self.bias.at[group, pl.ds(part * layout.width + tile.feature, features)],
                self.bias_in_memory.at[tile.slot, pl.ds(part * features, features)],
                self.full.at[tile.slot],
            )

    def bias_of(self, tile: Tile, block):
        """The bias of a block's features, float32 [64]; zeros for rows past the last group."""
        first = block * 64 if isinstance(block, int) else pl.multiple_of(block * 64, 64)
        features = pl.ds(first, 64)
        bias = plgpu.load(
            self.bias_in_memory.at[tile.slot, features],
            layout=plgpu.Layout.WGMMA.reduce(1),
            optimized=False,
        )
        has_group = jnp.broadcast_to(tile.k_steps, bias.shape) > 0
        return jnp.where(has_group, bias.astype(jnp.float32), 0.0)

    def loaded(self, i) -> Tile:
        """What `load` has brought."""
        slot = lax.rem(i, jnp.int32(TILES))
        if self.layout.word_copies():
            plgpu.barrier_wait(self.full.at[slot])
        (tile, slice_of), place = self.number(i), None
        if self.layout.equal:
            words = self.equal_tile(tile)
        elif self.layout.single_rows:
            word = slot, self.word_of(self.layout.place, tile)
            place = self.words[tile] if self.layout.chosen else self.in_memory[word]
            words = tile, jnp.int32(1), group_of(place)
        else:
            words = [self.in_memory[slot, word] for word in range(3)]
        return self.tile_of(i, tile, words, slice_of, place)

    @staticmethod
    def word_of(first, row):
        """Where the word of a tile's first row is, of those that begin at `first`."""
        return first + lax.rem(row, jnp.int32(TILE_WORDS))

    def run_at(self, tile: Tile, row):
        """The slot of a row of the tile, and the end of its run."""
        whole, row = tile.row - tile.skipped, tile.skipped + row
        place = self.in_memory[tile.slot, self.word_of(self.layout.place, whole) + row]
        end = self.in_memory[tile.slot, self.word_of(self.layout.run_end, whole) + row]
        return slot_of(place), end - tile.row

    def adapted_rows(self, tile: Tile):
        """The rows to look for runs in: none if the whole tile is one."""
        _, end = self.run_at(tile, 0)
        return jnp.where(end >= tile.rows, 0, tile.rows)

    def only_slot(self, tile: Tile):
        """The slot of all the tile's rows; -1 if they have several, or none."""
        if self.layout.single_rows:
            return slot_of(tile.place)
        slot, end = self.run_at(tile, 0)
        return jnp.where(end >= tile.rows, slot, -1)

    def wait(self, tile: Tile):
        """For the memory warpgroup, which reads the runs too."""
        if self.layout.word_copies():
            plgpu.barrier_wait(self.full.at[tile.slot])

    def release(self, tile: Tile):
        if self.layout.word_copies():
            plgpu.barrier_arrive(self.empty.at[tile.slot])

    def walk_runs(self, tile: Tile, begin, end, visit, carry):
        """visit(slot, first, stop, carry) for the adapted runs of the tile's rows [begin, end).

        `begin` and `end` count from the tile's first row, those of a run from `begin`.
        """

        def run(state):
            row, carry = state
            slot, stop = self.run_at(tile, row)
            stop = jnp.minimum(stop, end)
            carry = lax.cond(
                slot >= 0,
                lambda carry: visit(slot, row - begin, stop - begin, carry),
                lambda carry: carry,
                carry,
            )
            return stop, carry

        return lax.while_loop(lambda state: state[0] < end, run, (jnp.int32(begin), carry))[1]

    def is_mixed(self, tile: Tile):
        """Whether the tile has several runs, which are added in place."""
        if not self.layout.in_place:
            return jnp.bool(False)
        return self.run_at(tile, 0)[1] < tile.rows

    def for_parts(self, tile: Tile, by_run, handle, carry):
        """handle(part, carry) for the tile, or for each of its runs as a tile of its own."""

        def part(state):
            row, _, carry = state
            stop = lax.cond(by_run, lambda: self.run_at(tile, row)[1], lambda: tile.rows)
            stop = jnp.minimum(stop, tile.rows)
            its = tile._replace(row=tile.row + row, rows=stop - row, skipped=row)
            return stop, stop < tile.rows, handle(its, carry)

        # Once for a tile without rows.
        state = jnp.int32(0), jnp.bool(True), carry
        return lax.while_loop(lambda state: state[1], part, state)[2]
