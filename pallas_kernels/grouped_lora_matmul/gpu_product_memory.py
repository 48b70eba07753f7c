"""The memory warpgroup of a product's program: it loads the stages of each tile."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.grouped_lora_matmul.gpu_product_layout import K_STEP, LoraArrays, Stages
from pallas_kernels.grouped_lora_matmul.gpu_rows import slot_of
from pallas_kernels.grouped_lora_matmul.gpu_tiles import Tile, TileFeed


class ProductMemory:
    """Loads x and W of a tile's K steps, then B and u of its adapters.

    Args:
      layer: of W and of adapters' arrays that have those of many layers.
    """

    def __init__(self, feed: TileFeed, stages: Stages, x, w, lora: LoraArrays, layer):
        self.layout, self.schedule = feed.layout, feed.schedule
        self.feed, self.stages, self.x, self.w = feed, stages, x, w
        self.lora, self.layer = lora, layer
        self.first_group = layer * self.layout.groups_of_layer
        self.first_slots = [layer * count for count in self.layout.slots_of_layer]

    def load_tile(self, tile: Tile, step):
        depth, inner = self.schedule.depth, self.layout.inner
        # Of a row without an adapter: some A, which nobody uses.
        row_slot = jnp.maximum(slot_of(self.feed.places[tile.row]), 0) if inner else None

        def load_blocks(height, first_step, block):
            """Those of this number of every stage."""
            rows = pl.ds(tile.row, height)

            def k_step(k, step):
                stage = self.acquire(step)
                column = (k * depth + block) * K_STEP
                plgpu.copy_gmem_to_smem(
                    self.x.at[rows, pl.ds(column, K_STEP)],
                    self.stages.x_load.at[stage, block, pl.ds(0, height)],
                    self.stages.full.at[stage],
                )
                self.load_w(tile, column, stage, block)
                if inner:
                    where = self.stages.w_load.at[stage, block], self.layout.w_rows
                    barrier = self.stages.full.at[stage]
                    inner.load(self.lora.a, self.layer, row_slot, tile, column, *where, barrier)
                return step + 1

            return lax.fori_loop(0, tile.k_steps, k_step, first_step)

        def k_loop(height, step):
            if depth == 1:
                return load_blocks(height, step, 0)

            # One warp issues copies too slowly: each of the four takes its block of every stage.
            @plgpu.warp_map
            def _load(warp):
                load_blocks(height, step, warp)

            return step + tile.k_steps

        step = for_height(self.schedule.heights, tile.rows, k_loop, step)
        if self.layout.terms:
            self.feed.wait(tile)
            slot = self.feed.only_slot(tile)
            others = (lambda step: step) if inner else functools.partial(self.load_runs, tile)
            whole = functools.partial(self.load_whole, tile, slot)
            step = lax.cond(slot >= 0, whole, others, step)
            # All its warps have read the words before a copy of its own replaces them.
            plgpu.commit_smem()
        return step

    def acquire(self, step):
        stage = self.stages.stage_of(step)

        @pl.when(step >= self.schedule.stages)
        def _wait():
            plgpu.barrier_wait(self.stages.empty.at[stage])

        return stage

    def load_w(self, tile, column, stage, part_of_stage):
        layout, features = self.layout, self.schedule.features
        columns = pl.ds(column, K_STEP)
        w_load = self.stages.w_load.at[stage, part_of_stage]
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

    def load_whole(self, tile, slot, step):
        """The low-rank stages of a tile with one adapter."""

        def load(height, step):
            return self.load_low_rank(tile, 0, height, slot, step)

        return for_height(self.schedule.heights, tile.rows, load, step)

    def load_runs(self, tile, step):
        """The low-rank stages of each chunk's runs."""
        size, adapted = self.layout.chunk, self.feed.adapted_rows(tile)

        def load_chunk(chunk, step):
            def load(slot, first, stop, step):
                del first, stop
                return self.load_low_rank(tile, chunk * size, size, slot, step)

            return self.feed.walk_runs(tile, adapted, chunk * size, load, step)

        return lax.fori_loop(0, lax.div(adapted + size - 1, size), load_chunk, step)

    def load_low_rank(self, tile, begin, count, slot, step):
        layout = self.layout
        rows = pl.ds(tile.row + begin, count)

        def load_set(its, j, step):
            stage = self.acquire(step)
            barrier = self.stages.low_rank_full.at[stage]
            first_rank = pl.multiple_of(j * layout.rank_step, layout.rank_step)
            for place, term in enumerate(its.terms):
                self.load_b(tile, its.rank_class.own(slot), term, first_rank, stage, place)
                if layout.inner:
                    continue
                plgpu.copy_gmem_to_smem(
                    self.lora.u[layout.u_array[term]].at[
                        rows, pl.ds(layout.u_first[term] + first_rank, layout.rank_step)
                    ],
                    self.stages.u_load.at[stage, pl.ds(place * layout.x_rows, count)],
                    barrier,
                )
            return step + 1

        for its in layout.sets():
            load = functools.partial(load_set, its)
            step = lax.fori_loop(0, layout.steps_of(its, tile.feature, slot), load, step)
        return step

    def load_b(self, tile, slot, term, first_rank, stage, place):
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
            plgpu.copy_gmem_to_smem(source, target, self.stages.low_rank_full.at[stage])

        if not layout.by_rows:
            target = self.stages.b.at[stage * layout.b_per_stage + place]
            load(first_rank, column, self.schedule.features, target)
            return
        for block in range(layout.feature_blocks):
            # u has a term's ranks where A was among the rows of W: there are none before in B.
            ranks = first_rank - layout.ranks_before[term]
            load(ranks, column + 64 * block, 64, self.stages.b_block(stage, place, block))
