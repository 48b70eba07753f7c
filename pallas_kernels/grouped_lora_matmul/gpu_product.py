"""The Hopper kernel behind every product: y = x·W of each row's group, plus its low-rank terms.

Roles are swapped against a textbook matmul: features are the M side of the tensor core
instruction and rows its N side, which goes in steps of 8. So a tile of any few rows costs about
what its rows cost, and the same kernel serves decode (8 rows a tile) and prefill.

    a tile = F features x up to `heights[-1]` rows of one group
    ring of stages: [ W: F x 64 | x: rows x 64 ]       one k-step (or four, where tiles are few);
                                                       loaded by the memory warpgroup
    after the K loop, the same sums go on over the ranks:
        one adapter in the tile:    [ B: rank x F | u: rows x rank ]
        each run of rows of a slot: [ B: rank x F | u: 32 x rank ]     into a copy of the sums, from
                                                                       which a select takes its rows
                                                       where ranks have classes: as many as the
                                                       slot's class has
    ring of tiles:  [ words of the table | place and run end of each row ]

What a tile is comes through shared memory too: read from global memory, its words would cost the
tensor cores a microsecond before every tile.

Every output element is the sum over K in order, then over the ranks of each term, in one
accumulator, whatever the tile is: bits do not depend on the schedule. A select, not a mask on u,
keeps rows apart: 0 x NaN would not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gate import Gate, gated
from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.grouped_lora_matmul.gpu_product_layout import K_STEP, ProductLayout
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables
from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILES, ProductSchedule
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Columns
from pallas_kernels.grouped_lora_matmul.gpu_tiles import Tile, TileFeed
from pallas_kernels.hopper.accumulate import continued
from pallas_kernels.hopper.memory import drain, views_of
from pallas_kernels.hopper.store import store_rows, whole_lines


class Terms(NamedTuple):
    """The low-rank terms of one product.

    Attributes:
      u: one for each term. factors: one [S, G or 1, R, width] each.
    """

    u: tuple[Columns, ...]
    factors: tuple[jax.Array, ...]


def product_kernel(
    tables: Tables,
    x,
    w,
    terms: Terms | None,
    starts: tuple[int, ...],
    firsts: tuple[int, ...],
    schedule: ProductSchedule,
    contract: int,
    gate: Gate | None,
    out_dtype: np.dtype,
    *,
    interpreted: bool = False,
):
    """Runs the kernel over the tiles of the table.

    Args:
      x: [M, K]. w: [G, N, K] (contract 2) or [G, K, N] (contract 1).
      starts: the first output column of each term. firsts: the first slot of its factor; terms
        are class by class.
      out_dtype: x's, or float32 where there is no gate.
      interpreted: for the interpreter, which knows no layouts.

    Returns:
      [M, N] in out_dtype, or [M, N / 2] when gated.
    """
    single_rows = tables.tiles is None
    layout = ProductLayout(
        x, w, terms, starts, firsts, schedule, contract, gate, single_rows, interpreted, out_dtype
    )
    kernel = plgpu.kernel(
        functools.partial(_body, layout),
        out_type=jax.ShapeDtypeStruct((x.shape[0], whole_lines(layout.width, 64)), out_dtype),
        grid=(schedule.programs,),
        grid_names=("program",),
        num_threads=schedule.consumers + 1,
        thread_name="warpgroup",
        scratch_types=layout.scratch(),
        compiler_params=plgpu.CompilerParams(
            approx_math=gate is None,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=layout.name(),
    )
    if layout.parts == 2:
        w = w.reshape(w.shape[0], 2, layout.width, w.shape[2])
    lora = ()
    if terms is not None:
        lora = (
            tables.place,
            tables.run_end,
            *layout.distinct_u(terms),
            *terms.factors,
        )
    tiles = (tables.place,) if tables.tiles is None else tables.tiles
    return kernel(*tiles, x, w, *lora)[:, : layout.width]


def _body(layout: ProductLayout, *refs, tile_words, tile_full, tile_empty, **scratch):
    s = layout.schedule
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    if layout.single_rows:
        words, x, w, *lora, y = refs
        count = layout.rows
    else:
        counts, words, x, w, *lora, y = refs
        count = counts[counts.shape[0] - 1]
    total = count * layout.feature_tiles
    mine = lax.div(total - program + (s.programs - 1), jnp.int32(s.programs))
    places, run_ends, *lora = lora if layout.terms else (None, None)
    feed = TileFeed(layout, program, words, places, run_ends, tile_words, tile_full, tile_empty)
    kernel = _Kernel(layout, feed, x, w, y, lora, **scratch)

    @pl.when(warpgroup == s.consumers)
    def _memory():
        if s.consumers > 1:
            plgpu.set_max_registers(40, action="decrease")

        def load(i, state):
            tile, step = state
            # A carried number's divisors are forgotten.
            tile = tile._replace(feature=pl.multiple_of(tile.feature, 64))
            # Read now, needed after this tile.
            following = feed.read(i + 1)
            feed.load(tile, i)
            return following, kernel.load_tile(tile, step)

        _, steps = lax.fori_loop(0, mine, load, (feed.read(0), jnp.int32(0)))
        drain(kernel.empty, steps, s.stages)
        drain(feed.empty, mine, TILES)

    @pl.when(warpgroup < s.consumers)
    def _compute():
        if s.consumers > 1:
            plgpu.set_max_registers(232, action="increase")

        def compute(i, step):
            tile = feed.loaded(i)
            step = kernel.compute_tile(tile, step, warpgroup)
            feed.release(tile)
            return step

        lax.fori_loop(0, mine, compute, jnp.int32(0))
        # Read is enough: the kernel's end makes what was stored visible.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Kernel:
    """The two roles of a program, over the kernel's references."""

    def __init__(
        self,
        layout,
        feed,
        x,
        w,
        y,
        lora,
        x_stage,
        w_stage,
        out,
        full,
        empty,
        low_rank_full=None,
    ):
        self.layout, self.schedule, self.feed = layout, layout.schedule, feed
        self.x, self.w, self.y = x, w, y
        uses = (2, 2) if layout.terms else (2,)
        (self.x_load, self.x_tiles), *u_views = views_of(
            x_stage, *uses, interpreted=layout.interpreted
        )
        uses = (2, 1) if layout.terms else (2,)
        (self.w_load, self.w_tiles), *b_views = views_of(
            w_stage, *uses, interpreted=layout.interpreted
        )
        if layout.terms:
            ((self.u_load, self.u_tiles),), ((self.b,),) = u_views, b_views
            arrays = lora[: -layout.terms]
            self.u = [arrays[number] for number in layout.u_array]
            self.factors = lora[-layout.terms :]
        self.out, self.full, self.empty, self.low_rank_full = out, full, empty, low_rank_full

    def stage_of(self, step):
        return lax.rem(step, jnp.int32(self.schedule.stages))

    # The memory warpgroup.

    def load_tile(self, tile: Tile, step):
        depth = self.schedule.depth

        def load_blocks(height, first_step, block):
            """Those of this number of every stage."""
            rows = pl.ds(tile.row, height)

            def k_step(k, step):
                stage = self.acquire(step)
                column = (k * depth + block) * K_STEP
                plgpu.copy_gmem_to_smem(
                    self.x.at[rows, pl.ds(column, K_STEP)],
                    self.x_load.at[stage, block, pl.ds(0, height)],
                    self.full.at[stage],
                )
                self.load_w(tile, column, stage, block)
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
            step = lax.cond(
                slot >= 0,
                functools.partial(self.load_whole, tile, slot),
                functools.partial(self.load_runs, tile),
                step,
            )
            # All its warps have read the words before a copy of its own replaces them.
            plgpu.commit_smem()
        return step

    def acquire(self, step):
        stage = self.stage_of(step)

        @pl.when(step >= self.schedule.stages)
        def _wait():
            plgpu.barrier_wait(self.empty.at[stage])

        return stage

    def load_w(self, tile, column, stage, part_of_stage):
        layout, features = self.layout, self.schedule.features
        columns = pl.ds(column, K_STEP)
        w_load = self.w_load.at[stage, part_of_stage]
        barrier = self.full.at[stage]

        def source(part, feature, count):
            features = pl.ds(tile.feature + feature, count)
            if layout.contract == 1:
                return self.w.at[tile.group, columns, features]
            if layout.parts == 1:
                return self.w.at[tile.group, features, columns]
            return self.w.at[tile.group, part, features, columns]

        if layout.w_copies > 1:
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
            barrier = self.low_rank_full.at[stage]
            first_rank = pl.multiple_of(j * layout.rank_step, layout.rank_step)
            for place, term in enumerate(its.terms):
                group = 0 if layout.shared[term] else tile.group
                column = tile.feature - (0 if layout.gate is not None else layout.starts[term])
                plgpu.copy_gmem_to_smem(
                    self.factors[term].at[
                        its.rank_class.own(slot),
                        group,
                        pl.ds(first_rank, layout.rank_step),
                        pl.ds(column, self.schedule.features),
                    ],
                    self.b.at[stage * layout.b_per_stage + place],
                    barrier,
                )
                plgpu.copy_gmem_to_smem(
                    self.u[term].at[
                        rows, pl.ds(layout.u_first[term] + first_rank, layout.rank_step)
                    ],
                    self.u_load.at[stage, pl.ds(place * layout.x_rows, count)],
                    barrier,
                )
            return step + 1

        for its in layout.sets():
            load = functools.partial(load_set, its)
            step = lax.fori_loop(0, layout.steps_of(its, tile.feature, slot), load, step)
        return step

    # The consumer warpgroups.

    def compute_tile(self, tile: Tile, step, warpgroup):
        multiply = functools.partial(self.multiply, tile, warpgroup)
        sums, step = for_height(self.schedule.heights, tile.rows, multiply, step)
        if self.layout.terms:
            adapted = self.feed.adapted_rows(tile)
            # Out of the way of tiles of one adapter, or none: their code follows itself.
            add = functools.partial(self.add_runs, tile, warpgroup, adapted)
            sums, step = lax.cond(adapted > 0, add, lambda *carry: carry, sums, step)
        for number, chunk in enumerate(self.layout.chunks):
            part = tuple(tuple(total[piece.number] for piece in chunk) for total in sums)
            store = functools.partial(self.store, tile, warpgroup, number, chunk, part)
            if number == 0:
                store()
            else:
                pl.when(tile.rows > chunk[0].start)(store)
        self.store_rest(tile, warpgroup)
        return step

    def multiply(self, tile, warpgroup, height, step):
        """The base product: each accumulator in pieces, which mean nothing from `height` on."""
        s, layout = self.schedule, self.layout
        blocks = layout.parts * s.blocks

        def k_loop(*accumulators):
            def k_step(k, step):
                stage = self.stage_of(step)
                plgpu.barrier_wait(self.full.at[stage])
                for part in range(s.depth):
                    rows = self.x_tiles.at[stage, part, pl.ds(0, height)].T
                    for i, accumulator in enumerate(accumulators):
                        features = self.w_tiles.at[stage, part, self.block_of(warpgroup, i)]
                        if layout.contract == 1:
                            features = features.T
                        plgpu.wgmma(accumulator, features, rows)
                # All but the products just issued have ended: the stage before is free.
                plgpu.wgmma_wait(s.depth * blocks)

                @pl.when(k > 0)
                def _release():
                    plgpu.barrier_arrive(self.empty.at[self.stage_of(step + (s.stages - 1))])

                return step + 1

            end = lax.fori_loop(0, tile.k_steps, k_step, step)
            plgpu.wgmma_wait(0)

            @pl.when(tile.k_steps > 0)
            def _release():
                plgpu.barrier_arrive(self.empty.at[self.stage_of(end + (s.stages - 1))])

            if layout.terms:
                places = [(i, 0, height) for i in range(blocks)]
                end = self.low_rank_steps(
                    warpgroup, accumulators, places, self.whole_steps(tile), end
                )
            return tuple(accumulator[...] for accumulator in accumulators), end

        sums, end = pl.run_scoped(k_loop, *[plgpu.ACC((64, height)) for _ in range(blocks)])

        def cut(total, piece):
            if piece.start < height:
                return total[:, piece.start : piece.start + piece.width]
            return total[:, : piece.width] + tile.rows.astype(jnp.float32)

        pieces = [piece for chunk in layout.chunks for piece in chunk]
        return tuple(tuple(cut(t, piece) for piece in pieces) for t in sums), end

    def block_of(self, warpgroup, i):
        """Which 64-feature block of a stage is accumulator i of a warpgroup."""
        s = self.schedule
        part, block = divmod(i, s.blocks)
        return part * (s.features // 64) + warpgroup * s.blocks + block

    def low_rank_steps(self, warpgroup, accumulators, places, steps, step):
        """Adds `steps` stages of u·B to accumulators, each (i, first row in the stage, rows)."""
        s, layout = self.schedule, self.layout

        def add(j, step):
            stage = self.stage_of(step)
            plgpu.barrier_wait(self.low_rank_full.at[stage])
            for accumulator, (i, row, count) in zip(accumulators, places, strict=True):
                feature = (warpgroup * s.blocks + i % s.blocks) * 64
                for place in layout.places_of_part(i // s.blocks):
                    b = self.b.at[stage * layout.b_per_stage + place, :, pl.ds(feature, 64)]
                    u = self.u_tiles.at[stage, pl.ds(place * layout.x_rows + row, count)]
                    plgpu.wgmma(accumulator, b.T, u.T)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.empty.at[stage])
            return step + 1

        return lax.fori_loop(0, steps, add, step)

    def whole_steps(self, tile):
        """Low-rank stages of a tile with one adapter; 0 for others."""
        slot = self.feed.only_slot(tile)
        return jnp.where(slot >= 0, self.steps_of_run(tile, slot), 0)

    def steps_of_run(self, tile, slot):
        sets = self.layout.sets()
        return sum(self.layout.steps_of(its, tile.feature, slot) for its in sets)

    def add_runs(self, tile, warpgroup, adapted, sums, step):
        """Adds u·B of each run in the tile's rows up to `adapted`."""
        parts = []
        for chunk in self.layout.chunks:
            part = tuple(tuple(total[piece.number] for piece in chunk) for total in sums)
            add = functools.partial(self.add_low_rank, tile, chunk, warpgroup)
            part, step = self.feed.walk_runs(tile, adapted, chunk[0].start, add, (part, step))
            parts.append(part)
        # Pieces are numbered chunk after chunk.
        return tuple(sum(its, ()) for its in zip(*parts, strict=True)), step

    def add_low_rank(self, tile, chunk, warpgroup, slot, first, stop, carry):
        """Adds u·B to the rows [first, stop) of a chunk."""
        s, layout = self.schedule, self.layout
        sums, step = carry
        begin = chunk[0].start
        steps = self.steps_of_run(tile, slot)
        places = [(i, p) for i in range(layout.parts * s.blocks) for p in range(len(chunk))]
        rows = [(i, chunk[p].start - begin, chunk[p].width) for i, p in places]

        def products(accumulators):
            self.low_rank_steps(warpgroup, accumulators, rows, steps, step)

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

    def store(self, tile, warpgroup, number, chunk, sums):
        """Turns one chunk of a tile, [64 features, rows], to [rows, 64], and writes whole ones."""
        s, layout = self.schedule, self.layout
        begin = chunk[0].start
        for block in range(s.blocks):
            # A tile starts with the first buffer again, so all stores before it must have read.
            before = number * s.blocks + block
            buffer = self.out.at[warpgroup, before % s.buffers]
            plgpu.wait_smem_to_gmem(min(before, s.buffers - 1), wait_read_only=True)
            for p, piece in enumerate(chunk):
                total = sums[block][p]
                if layout.gate is not None:
                    # Of the rounded product, as training has it, which keeps the product.
                    left, right = (
                        half.astype(layout.dtype).astype(jnp.float32)
                        for half in (total, sums[s.blocks + block][p])
                    )
                    total = gated(left, right, layout.gate)
                total = total.astype(layout.out_dtype)
                turned = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
                buffer.at[pl.ds(piece.start - begin, piece.width)].T[...] = turned
            plgpu.commit_smem()

            @pl.when(tile.rows >= begin + layout.chunk)
            def _store(buffer=buffer, block=block):
                target = self.y.at[
                    pl.ds(tile.row + begin, layout.chunk), self.columns_of(tile, warpgroup, block)
                ]
                plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)

            plgpu.commit_smem_to_gmem_group()

    def store_rest(self, tile, warpgroup):
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
                    self.out.at[warpgroup, buffer],
                    self.y,
                    tile.row + number * chunk,
                    rest,
                    chunk,
                    self.columns_of(tile, warpgroup, block),
                )

    def columns_of(self, tile, warpgroup, block):
        """The output columns of one of a warpgroup's blocks."""
        return pl.ds(tile.feature + (warpgroup * self.schedule.blocks + block) * 64, 64)
