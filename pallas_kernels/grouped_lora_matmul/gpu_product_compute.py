"""The warpgroups of a product's program that multiply, and store."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gate import gated
from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.grouped_lora_matmul.gpu_product_in_place import InPlace, for_tiles
from pallas_kernels.grouped_lora_matmul.gpu_product_layout import LoraArrays
from pallas_kernels.grouped_lora_matmul.gpu_product_stages import Stages
from pallas_kernels.grouped_lora_matmul.gpu_tiles import Tile, TileFeed
from pallas_kernels.hopper.accumulate import continued
from pallas_kernels.hopper.store import store_rows, store_turned


class ProductConsumer:
    """One warpgroup's features of a tile: the K loop, the low-rank steps, the stores.

    Args:
      layer: of the adapters' arrays that have those of many layers.
      out: its buffers, and those of the others.
      in_place: what adds runs, where they are added in place.
      say: says that tiles up to the program's i-th are in memory, where somebody waits for them.
    """

    def __init__(
        self,
        feed: TileFeed,
        stages: Stages,
        lora: LoraArrays,
        layer,
        out,
        y,
        warpgroup,
        in_place: InPlace | None,
        say: Callable[[jax.Array], None] | None = None,
    ):
        self.layout, self.schedule = feed.layout, feed.schedule
        self.feed, self.stages = feed, stages
        self.lora, self.layer = lora, layer
        self.out, self.y, self.warpgroup = out, y, warpgroup
        self.in_place, self.say = in_place, say

    def compute_tiles(self, judge, step):
        """Computes the program's tiles from a step on; `judge` is that of `for_tiles`."""

        def compute(i, again, step):
            tile = self.feed.loaded(i)
            is_mixed = self.feed.is_mixed(tile)
            step = self.compute_tile(tile, again, step, i)
            self.feed.release(tile)
            return step, is_mixed

        end = for_tiles(self.layout, self.feed.count, compute, judge, step)[1]
        if self.say is not None:
            pl.when(self.feed.count > 0)(lambda: self.say(self.feed.count - 1))
        return end

    def compute_tile(self, tile: Tile, by_run, step, i):
        """Computes the i-th tile, or each run of it as a tile of its own; returns the next step."""
        if not self.layout.in_place:
            return self.compute_part(tile, step, i)
        return self.feed.for_parts(tile, by_run, self.compute_part, step)

    def compute_part(self, tile: Tile, step, i=None):
        if self.layout.has_runs:
            # Read while W is on its way.
            adapted = self.feed.adapted_rows(tile)
        multiply = functools.partial(self.multiply, tile)
        sums, step = for_height(self.schedule.heights, tile.rows, multiply, step)
        if self.layout.has_runs:
            # Out of the way of tiles of one adapter, or none: their code follows itself.
            add = functools.partial(self.add_runs, tile, adapted)
            sums, step = lax.cond(adapted > 0, add, lambda *carry: carry, sums, step)
        if self.say is not None:
            # What was stored before this tile's K loop is there by now.
            pl.when(i > 0)(lambda: self.say(i - 1))
        for number, chunk in enumerate(self.layout.chunks):
            part = tuple(tuple(total[piece.number] for piece in chunk) for total in sums)
            store = functools.partial(self.store, tile, number, chunk, part)
            if number == 0:
                store()
            else:
                pl.when(tile.rows > chunk[0].start)(store)
        if not self.layout.stores_rows:
            self.store_rest(tile)
        return step

    def multiply(self, tile, height, step):
        """The base product: each accumulator in pieces, which mean nothing from `height` on."""
        s, layout = self.schedule, self.layout
        blocks, inner = layout.parts * s.blocks, layout.inner
        if layout.terms and not layout.in_place:
            # Read while W is on its way.
            slot = self.feed.only_slot(tile)
        if inner:
            some = jnp.maximum(slot, 0)
            scalings = inner.scaling(self.lora.scalings, self.layer, some, tile)

        is_mixed = self.feed.is_mixed(tile)
        blocks_of_a = layout.blocks_of_a if inner else 0

        def compute(*accumulators):
            sums, of_a = accumulators[:blocks], accumulators[blocks:]

            def k_loop(of_a, step):
                def k_step(k, step):
                    stage = self.stages.stage_of(step)
                    plgpu.barrier_wait(self.stages.full.at[stage])
                    for part in range(s.depth):
                        rows = self.stages.x_block(stage, k, part, height).T
                        for i, accumulator in enumerate(sums):
                            features = self.stages.w_block(stage, part, self.block_of(i))
                            if layout.contract == 1:
                                features = features.T
                            plgpu.wgmma(accumulator, features, rows)
                        for accumulator in of_a:
                            plgpu.wgmma(accumulator, self.stages.a_block(stage, part), rows)
                    # All but the products just issued have ended: the stage before is free.
                    plgpu.wgmma_wait(s.depth * (len(sums) + len(of_a)))

                    @pl.when(k > 0)
                    def _release():
                        self.stages.release(step + (s.stages - 1))

                    return step + 1

                end = lax.fori_loop(0, tile.k_steps, k_step, step)
                if not layout.in_place:
                    plgpu.wgmma_wait(0)
                return end

            without_a = functools.partial(k_loop, ())
            if of_a:
                end = lax.cond(slot >= 0, functools.partial(k_loop, of_a), without_a, step)
            else:
                end = without_a(step)

            if not layout.in_place:
                pl.when(tile.k_steps > 0)(lambda: self.stages.release(end + (s.stages - 1)))
            if inner:
                total = accumulators[-1][...]
                scaled = functools.partial(inner.scaled, total, scalings, layout.first_rank)
                pl.when(slot >= 0)(lambda: self.store_u(scaled()))
            if layout.in_place:
                end = self.in_place.add_runs(tile, is_mixed, sums, height, end)
            elif layout.terms:
                places = [(i, 0, height) for i in range(blocks)]
                steps = jnp.where(slot >= 0, self.steps_of_run(tile, slot), 0)
                end = self.low_rank_steps(sums, places, steps, end)
            totals = tuple(accumulator[...] for accumulator in sums)
            if layout.in_place:
                pl.when(is_mixed)(lambda: self.in_place.look_at(totals))
            return totals, end

        count = blocks + blocks_of_a
        sums, end = pl.run_scoped(compute, *[plgpu.ACC((64, height)) for _ in range(count)])

        def cut(total, piece):
            if piece.start < height:
                return total[:, piece.start : piece.start + piece.width]
            return total[:, : piece.width] + tile.rows.astype(jnp.float32)

        pieces = [piece for chunk in layout.chunks for piece in chunk]
        return tuple(tuple(cut(t, piece) for piece in pieces) for t in sums), end

    def block_of(self, i):
        """Which 64-feature block of a stage is accumulator i."""
        s = self.schedule
        part, block = divmod(i, s.blocks)
        return part * self.layout.feature_blocks + self.warpgroup * s.blocks + block

    def store_u(self, total):
        """Puts u [64 ranks, rows] where this consumer's low-rank steps read it."""
        rows = self.stages.own_u.at[self.warpgroup, pl.ds(0, total.shape[1])]
        store_turned(rows, total.astype(self.layout.dtype))
        plgpu.commit_smem()

    def low_rank_steps(self, accumulators, places, steps, step):
        """Adds `steps` stages of u·B to accumulators, each (i, first row in the stage, rows)."""
        s, layout = self.schedule, self.layout

        def add(j, step):
            stage = self.stages.stage_of(step)
            plgpu.barrier_wait(self.stages.low_rank_full.at[stage])
            for accumulator, (i, row, count) in zip(accumulators, places, strict=True):
                block = self.warpgroup * s.blocks + i % s.blocks
                for place in layout.places_of_part(i // s.blocks):
                    b = self.stages.b_block(stage, 0, place, block)
                    if layout.inner:
                        u = self.stages.own_u_tiles.at[self.warpgroup, pl.ds(0, count)]
                    else:
                        rows = pl.ds(place * layout.x_rows + row, count)
                        u = self.stages.u_tiles.at[stage, 0, rows]
                    plgpu.wgmma(accumulator, b.T, u.T)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.stages.empty.at[stage])
            return step + 1

        return lax.fori_loop(0, steps, add, step)

    def steps_of_run(self, tile, slot):
        sets = self.layout.sets()
        return sum(self.layout.steps_of(its, tile.feature, slot) for its in sets)

    def add_runs(self, tile, adapted, sums, step):
        """Adds u·B of each run in the tile's rows up to `adapted`."""
        parts = []
        for chunk in self.layout.chunks:
            part = tuple(tuple(total[piece.number] for piece in chunk) for total in sums)
            add = functools.partial(self.add_low_rank, tile, chunk)
            begin = chunk[0].start
            end = jnp.minimum(adapted, begin + self.layout.chunk)
            part, step = self.feed.walk_runs(tile, begin, end, add, (part, step))
            parts.append(part)
        # Pieces are numbered chunk after chunk.
        return tuple(sum(its, ()) for its in zip(*parts, strict=True)), step

    def add_low_rank(self, tile, chunk, slot, first, stop, carry):
        """Adds u·B to the rows [first, stop) of a chunk."""
        s, layout = self.schedule, self.layout
        sums, step = carry
        begin = chunk[0].start
        steps = self.steps_of_run(tile, slot)
        places = [(i, p) for i in range(layout.parts * s.blocks) for p in range(len(chunk))]
        rows = [(i, chunk[p].start - begin, chunk[p].width) for i, p in places]

        def products(accumulators):
            self.low_rank_steps(accumulators, rows, steps, step)

        old = [sums[i][p] for i, p in places]
        new = continued(old, products, layout.interpreted)
        totals = [list(pieces) for pieces in sums]
        for its, before, (i, p), (_, row, width) in zip(new, old, places, rows, strict=True):
            chosen = self.between(width, first - row, stop - row)
            totals[i][p] = jnp.where(chosen, its, before)
        return tuple(map(tuple, totals)), step + steps

    @staticmethod
    def between(width, first, stop):
        """Which columns of [64, width] are in [first, stop)."""
        column = plgpu.broadcasted_iota(jnp.int32, (64, width), 1, layout=plgpu.Layout.WGMMA)
        return (column >= first) & (column < stop)

    def store(self, tile, number, chunk, sums):
        """Turns one chunk of a tile, [64 features, rows], to [rows, 64], and writes whole ones."""
        s, layout = self.schedule, self.layout
        begin = chunk[0].start
        for block in range(s.blocks):
            # A tile starts with the first buffer again, so all stores before it must have read.
            before = number * s.blocks + block
            buffer = self.out.at[self.warpgroup, before % s.buffers]
            plgpu.wait_smem_to_gmem(min(before, s.buffers - 1), wait_read_only=True)
            parts = [self.with_bias(tile, i, sums[i]) for i in range(block, len(sums), s.blocks)]
            for p, piece in enumerate(chunk):
                total = parts[0][p]
                if layout.gate is not None:
                    # Of the rounded product, as training has it, which keeps the product.
                    left, right = (
                        half[p].astype(layout.dtype).astype(jnp.float32) for half in parts
                    )
                    total = gated(left, right, layout.gate)
                total = total.astype(layout.out_dtype)
                rows = buffer.at[pl.ds(piece.start - begin, piece.width)]
                store_turned(rows, total, swizzled=bool(self.layout.out_transforms()))
            plgpu.commit_smem()

            def store(buffer=buffer, block=block):
                target = self.y.at[
                    pl.ds(tile.row + begin, layout.chunk), self.columns_of(tile, block)
                ]
                plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)

            if layout.stores_rows:
                self.store_row_by_row(tile, buffer, block)
            else:
                pl.when(tile.rows >= begin + layout.chunk)(store)
            plgpu.commit_smem_to_gmem_group()

    def with_bias(self, tile, i, pieces):
        """An accumulator's pieces, each [64 features, rows], plus the bias of its features."""
        if not self.layout.biased:
            return pieces
        bias = self.feed.bias_of(tile, self.block_of(i))
        return [piece + lax.broadcast_in_dim(bias, piece.shape, [0]) for piece in pieces]

    def store_row_by_row(self, tile, buffer, block):
        """Writes a block of a tile of one chunk."""
        first = self.columns_of(tile, block).start

        def store_columns(width):
            def store(row, carry):
                plgpu.copy_smem_to_gmem(
                    buffer.at[pl.ds(row, 1), pl.ds(0, width)],
                    self.y.at[pl.ds(tile.row + row, 1), pl.ds(first, width)],
                    commit_group=False,
                )
                return carry

            lax.fori_loop(0, tile.rows, store, None)

        slices = self.layout.slices
        if not slices.apart:
            store_columns(self.schedule.width)
            return
        for width in slices.widths:
            pl.when(slices.width_of(tile.feature) == width)(functools.partial(store_columns, width))

    def store_rest(self, tile):
        """Writes the rows of a tile's last chunk if it is not whole, still in its buffers.

        Once for all chunks: a copy for each power of two, in every chunk, was a third of the code.
        """
        s, chunk = self.schedule, self.layout.chunk
        number, rest = lax.div(tile.rows, jnp.int32(chunk)), lax.rem(tile.rows, jnp.int32(chunk))

        @pl.when(rest > 0)
        def _store():
            for block in range(s.blocks):
                buffer = lax.rem(number * s.blocks + block, jnp.int32(s.buffers))
                store_rows(
                    self.out.at[self.warpgroup, buffer],
                    self.y,
                    tile.row + number * chunk,
                    rest,
                    chunk,
                    self.columns_of(tile, block),
                )

    def columns_of(self, tile, block):
        """The output columns of a block."""
        s = self.schedule
        return pl.ds(tile.feature + (self.warpgroup * s.blocks + block) * 64, s.width)
