"""The memory warpgroup of a product's program: it loads the stages of each tile."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.grouped_lora_matmul.gpu_product_ahead import ShrinkAhead
from pallas_kernels.grouped_lora_matmul.gpu_product_beside import ShrinkBeside
from pallas_kernels.grouped_lora_matmul.gpu_product_in_place import for_tiles
from pallas_kernels.grouped_lora_matmul.gpu_product_layout import K_STEP, LoraArrays
from pallas_kernels.grouped_lora_matmul.gpu_product_stages import Stages
from pallas_kernels.grouped_lora_matmul.gpu_rows import slot_of
from pallas_kernels.grouped_lora_matmul.gpu_tiles import Tile, TileFeed

SHORT = 48  # rows of u that are loaded for a run that has fewer


class ProductMemory:
    """Loads x and W of a tile's K steps, then B and u of its adapters.

    Args:
      layer: of W, of the bias and of adapters' arrays that have those of many layers.
      beside: what makes u, where that is not there yet.
      wait_for_x: waits until there is x of a tile, which may be the first, if there is none when
        this warpgroup starts.
    """

    def __init__(
        self,
        feed: TileFeed,
        stages: Stages,
        x,
        w,
        lora: LoraArrays,
        layer,
        *,
        beside: ShrinkBeside | ShrinkAhead | None = None,
        wait_for_x: Callable[[Tile, jax.Array], None] | None = None,
    ):
        self.layout, self.schedule = feed.layout, feed.schedule
        self.feed, self.stages, self.x, self.w = feed, stages, x, w
        self.lora, self.layer = lora, layer
        self.beside, self.wait_for_x = beside, wait_for_x
        self.first_group = layer * self.layout.groups_of_layer
        self.first_slots = [layer * count for count in self.layout.slots_of_layer]

    def load_tiles(self, first: Tile, judge, step):
        """Loads the program's tiles from a step on; `judge` is that of `for_tiles`.

        `first` has been read already. Returns how many tiles that were, and the next step.
        """

        def load(i, again, state):
            tile, step = state
            # A carried number's divisors are forgotten.
            unit = math.gcd(64, self.schedule.features)
            tile = tile._replace(feature=pl.multiple_of(tile.feature, unit))
            # Read now, needed after this tile.
            following = self.feed.read(i + 1)
            self.feed.load(tile, i, self.layer)
            step, is_mixed = self.load_tile(tile, again, step, i == 0)
            return (following, step), is_mixed

        tiles, (_, step) = for_tiles(self.layout, self.feed.count, load, judge, (first, step))
        return tiles, step

    def load_tile(self, tile: Tile, by_run, step, is_first):
        """Loads a tile, or each of its runs as a tile of its own.

        Returns the next step, and whether the tile has several runs.
        """
        if self.layout.in_place:
            pl.when(by_run)(lambda: self.feed.wait(tile))
            load = functools.partial(self.load_part, wait=~by_run, is_first=is_first)
            step = self.feed.for_parts(tile, by_run, load, step)
        else:
            step = self.load_part(tile, step, is_first=is_first)
        is_mixed = self.feed.is_mixed(tile)
        if self.layout.terms:
            # All its warps have read the words before a copy of its own replaces them.
            plgpu.commit_smem()
        return step, is_mixed

    def load_part(self, tile: Tile, step, wait=True, is_first=False):
        """Loads a tile or a part of it, whose words are waited for when they are needed."""
        weights, rows = [functools.partial(self.load_w, tile)], []
        if self.layout.inner:
            weights.append(functools.partial(self.load_a, tile, slot_of(tile.place)))
        if not self.layout.normed:
            rows.append(functools.partial(self.load_x, tile))

        def k_loop(height, first_step):
            load = functools.partial(self.load_steps, height, first_step)
            begin = 0
            if self.wait_for_x is not None:
                # Until there is x, all weights that stages have room for.
                begin = jnp.where(is_first, jnp.minimum(tile.k_steps, self.schedule.stages), 0)
                load(*weights, begin=0, end=begin)
                self.wait_for_x(tile, is_first)
                load(*rows, begin=0, end=begin, acquire=False)
            load(*weights, *rows, begin=begin, end=tile.k_steps)
            return first_step + tile.k_steps

        step = for_height(self.schedule.heights, tile.rows, k_loop, step)
        if not self.layout.terms:
            return step
        pl.when(wait)(lambda: self.feed.wait(tile))
        if self.beside:
            pl.when(is_first & (tile.skipped == 0))(self.beside.wait)
        if self.layout.in_place:
            count = self.load_whole_runs(tile, step)
        else:
            slot = self.feed.only_slot(tile)
            whole = functools.partial(self.load_whole, tile, step, slot)
            runs = functools.partial(self.load_runs, tile, step)
            others = runs if self.layout.has_runs else lambda count: count
            count = lax.cond(slot >= 0, whole, others, jnp.int32(0))
        return self.stages.after(step, count)

    def load_steps(self, height, first_step, *loads, begin, end, acquire=True):
        """Of some K steps, what functions load of each block, when its stage is free.

        Args:
          loads: functions of the rows' height, the K step, the step and the block.
          acquire: False for stages that are theirs already.
        """
        depth = self.schedule.depth
        if not loads:
            return

        def for_steps(load_block):
            def k_step(k, step):
                if acquire:
                    self.acquire(step)
                load_block(k, step)
                return step + 1

            lax.fori_loop(begin, end, k_step, first_step + begin)

        def load_block(block, k, step):
            for load in loads:
                load(height, k, step, block)

        if depth == 1:
            for_steps(functools.partial(load_block, 0))
            return

        # One warp issues copies too slowly: each takes its block of every stage.
        @plgpu.warp_map
        def _load(warp):
            def load_own(k, step):
                pl.when(warp < depth)(lambda: load_block(warp, k, step))

            # Those without a block wait for stages too: a warp counts the phases that it has seen,
            # and later all wait together.
            for_steps(load_own)

    def acquire(self, step):
        """Waits until the step's stage is free."""

        @pl.when(step >= self.schedule.stages)
        def _wait():
            plgpu.barrier_wait(self.stages.empty.at[self.stages.stage_of(step)])

    def load_x(self, tile, height, k, step, block):
        """A block of the rows' columns."""
        stage, column = self.stages.stage_of(step), (k * self.schedule.depth + block) * K_STEP
        row = tile.row
        if self.layout.rows_of_x > 1:
            row = lax.div(row, jnp.int32(self.layout.rows_of_x))
        plgpu.copy_gmem_to_smem(
            self.x.at[pl.ds(row, height), pl.ds(column, K_STEP)],
            self.stages.x_load.at[stage, block, pl.ds(0, height)],
            self.stages.full.at[stage],
        )

    def load_a(self, tile, slot, height, k, step, block):
        """A for the rows of a block after W's. Of a row without an adapter nobody uses them."""
        del height
        stage, column = self.stages.stage_of(step), (k * self.schedule.depth + block) * K_STEP
        inner, barrier = self.layout.inner, self.stages.full.at[stage]

        @pl.when(slot >= 0)
        def _load():
            where = self.stages.w_load.at[stage, block], self.layout.w_rows
            inner.load(self.lora.a, self.layer, slot, tile, column, *where, barrier)

        @pl.when(slot < 0)
        def _do_without():
            for _ in range(inner.copies):
                plgpu.barrier_arrive(barrier)

    def load_w(self, tile, height, k, step, block):
        """A block of W."""
        del height
        stage, column = self.stages.stage_of(step), (k * self.schedule.depth + block) * K_STEP
        layout, features = self.layout, self.schedule.features
        columns = pl.ds(column, K_STEP)
        w_load = self.stages.w_load.at[stage, block]
        barrier = self.stages.full.at[stage]

        def source(part, feature, count):
            group, features = self.first_group + tile.group, pl.ds(tile.feature + feature, count)
            if layout.contract == 1:
                return self.w.at[group, columns, features]
            if layout.parts == 1:
                return self.w.at[group, features, columns]
            return self.w.at[group, part, features, columns]

        if layout.by_rows:
            for part in range(layout.parts):
                rows = pl.ds(part * features, features)
                plgpu.copy_gmem_to_smem(source(part, 0, features), w_load.at[rows], barrier)
        elif layout.w_copies > 1:
            for block in range(layout.w_copies):
                part, place = divmod(64 * block, features)
                plgpu.copy_gmem_to_smem(source(part, place, 64), w_load.at[block], barrier)
        elif layout.parts == 1:
            plgpu.copy_gmem_to_smem(source(0, 0, features), w_load.at[0], barrier)
        else:
            both = source(slice(None), 0, features)
            plgpu.copy_gmem_to_smem(both, w_load, barrier)

    def load_whole(self, tile, first_step, slot, count):
        """The low-rank steps of one slot, with u of all the tile's rows, after `count` others."""

        def load(height, count):
            load_u = functools.partial(self.load_u, tile, 0, height)
            return self.load_low_rank(tile, load_u, slot, first_step, count)

        return for_height(self.schedule.heights, tile.rows, load, count)

    def load_whole_runs(self, tile, first_step):
        """The low-rank steps of each run, with u where the run has rows."""

        def load(slot, first, stop, count):
            load_u = functools.partial(self.load_u_of_run, tile, first, stop)
            return self.load_low_rank(tile, load_u, slot, first_step, count)

        return self.feed.walk_runs(tile, 0, tile.rows, load, jnp.int32(0))

    def load_runs(self, tile, first_step, count):
        """The low-rank steps of each chunk's runs, with u of the chunk."""
        size, adapted = self.layout.chunk, self.feed.adapted_rows(tile)

        def load_chunk(chunk, count):
            def load(slot, first, stop, count):
                del first, stop
                return self.load_low_rank(tile, load_u, slot, first_step, count)

            begin = chunk * size
            load_u = functools.partial(self.load_u, tile, begin, size)
            return self.feed.walk_runs(tile, begin, jnp.minimum(adapted, begin + size), load, count)

        return lax.fori_loop(0, lax.div(adapted + size - 1, size), load_chunk, count)

    def load_low_rank(self, tile, load_u, slot, first_step, count):
        """B of a slot, and u as a function loads it: its low-rank steps, after `count` others."""
        layout = self.layout

        def load_set(its, j, count):
            step, stage, run, barrier = self.stages.of_run(first_step, count)
            pl.when(run == 0)(functools.partial(self.acquire, step))
            first_rank = pl.multiple_of(j * layout.rank_step, layout.rank_step)
            for place, term in enumerate(its.terms):
                target = stage, run, place, barrier
                self.load_b(tile, its.rank_class.own(slot), term, first_rank, *target)
                if not layout.inner:
                    load_u(term, first_rank, *target)
            return count + 1

        for its in layout.sets():
            load = functools.partial(load_set, its)
            count = lax.fori_loop(0, layout.steps_of(its, tile.feature, slot), load, count)
        return count

    def load_u(self, tile, begin, rows, term, first_rank, stage, run, place, barrier, at=0):
        """A term's u of `rows` of the tile's rows, from row `at` on."""
        layout = self.layout
        ranks = pl.ds(layout.u_first[term] + first_rank, layout.rank_step)
        plgpu.copy_gmem_to_smem(
            self.lora.u[layout.u_array[term]].at[pl.ds(tile.row + begin, rows), ranks],
            self.stages.u_load.at[stage, run, pl.ds(place * layout.x_rows + at, rows)],
            barrier,
        )

    def load_u_of_run(self, tile, first, stop, *target):
        """u of a run, where its rows are: the others become zeros, and few of them are loaded.

        Two conditions in place of `cond` make ptxas take descriptors' addresses from registers of
        lanes, in the whole kernel: 300 instructions more (NOTES, "Code that is there").
        """
        most = self.layout.x_rows
        begin = jnp.minimum(first - lax.rem(first, jnp.int32(8)), most - SHORT)
        begin = pl.multiple_of(begin, 8)
        is_short = stop - begin <= SHORT
        short = functools.partial(self.load_u, tile, begin, SHORT, *target, at=begin)
        lax.cond(is_short, short, functools.partial(self.load_u, tile, 0, most, *target))

    def load_b(self, tile, slot, term, first_rank, stage, run, place, barrier):
        layout = self.layout
        group = 0 if layout.shared[term] else tile.group
        column = tile.feature - (0 if layout.gate is not None else layout.starts[term])

        def load(first_rank, column, count, target):
            source = self.lora.b[term].at[
                self.first_slots[term] + slot,
                group,
                pl.ds(first_rank, layout.rank_step),
                pl.ds(column, count),
            ]
            plgpu.copy_gmem_to_smem(source, target, barrier)

        first = self.stages.first_b(stage, run)
        if not layout.by_rows:
            target = self.stages.b_load.at[first + place]
            load(first_rank, column, self.schedule.features, target)
            return
        for block in range(layout.feature_blocks):
            # u has a term's ranks where A was among the rows of W: there are none before in B.
            ranks = first_rank - layout.ranks_before[term]
            target = self.stages.b_load.at[first + place * layout.feature_blocks + block]
            load(ranks, column + 64 * block, 64, target)
