"""The Hopper kernel behind every product: y = x·W of each row's group, plus its low-rank terms.

Roles are swapped against a textbook matmul: features are the M side of the tensor core
instruction and rows its N side, which goes in steps of 8. So a tile of any few rows costs about
what its rows cost, and the same kernel serves decode (8 rows a tile) and prefill.

    a tile = F features x up to `heights[-1]` rows of one group
    ring of stages: [ W: F x 64 | x: rows x 64 ]       one k-step; loaded by the memory warpgroup
    after the K loop, for each stretch of rows of one slot (32 at most):
                    [ B: rank x F | u: 32 x rank ]     d = Bᵀ·uᵀ, added by a select on the rows
    ring of tiles:  [ words of the table | place and run end of each row ]

What a tile is comes through shared memory too: read from global memory, its words would cost the
tensor cores a microsecond before every tile.

Every output element is the sum over K in steps of 64 in one accumulator, then one addition for
each low-rank term, whatever the tile is: bits do not depend on the schedule. A select, not a mask
on u, keeps rows apart: 0 x NaN would not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gate import Gate, gated
from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.grouped_lora_matmul.gpu_memory import drain, overlaid, two_views, views_of
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables, group_of, slot_of
from pallas_kernels.grouped_lora_matmul.gpu_schedule import (
    CHUNK,
    LINE,
    TILE_WORDS,
    TILES,
    ProductSchedule,
    rank_step,
    u_columns,
    words_of_rows,
    words_of_tile,
    x_rows,
)
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Columns
from pallas_kernels.grouped_lora_matmul.gpu_store import store_rows

K_STEP = 64  # columns of one stage: 128 bytes, the widest swizzle


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
    schedule: ProductSchedule,
    contract: int,
    gate: Gate | None,
    *,
    interpreted: bool = False,
):
    """Runs the kernel over the tiles of the table.

    Args:
      x: [M, K]. w: [G, N, K] (contract 2) or [G, K, N] (contract 1).
      starts: the first output column of each term.
      interpreted: for the interpreter, which knows no layouts.

    Returns:
      [M, N] in x's dtype, or [M, N / 2] when gated.
    """
    single_rows = tables.tiles is None
    layout = _Layout(x, w, terms, starts, schedule, contract, gate, single_rows, interpreted)
    kernel = plgpu.kernel(
        functools.partial(_body, layout),
        out_type=jax.ShapeDtypeStruct((x.shape[0], layout.out_width), x.dtype),
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
            *(u.array for u in terms.u),
            *terms.factors,
        )
    tiles = (tables.place,) if tables.tiles is None else tables.tiles
    return kernel(*tiles, x, w, *lora)


class _Layout:
    """Sizes of one kernel, and its memory."""

    def __init__(self, x, w, terms, starts, schedule, contract, gate, single_rows, interpreted):
        self.single_rows, self.interpreted = single_rows, interpreted
        self.schedule, self.contract, self.gate, self.starts = schedule, contract, gate, starts
        self.parts = 2 if gate is not None else 1
        self.rows, self.k = x.shape
        self.groups = w.shape[0]
        self.width = w.shape[3 - contract] // self.parts
        self.out_width = self.width
        self.dtype = x.dtype
        self.k_steps = pl.cdiv(self.k, K_STEP)
        self.feature_tiles = pl.cdiv(self.width, schedule.features)
        self.chunk = min(CHUNK, schedule.heights[-1])
        self.chunks = chunks(schedule.heights, self.chunk)
        self.terms = 0 if terms is None else len(terms.factors)
        self.ranks = () if terms is None else tuple(f.shape[2] for f in terms.factors)
        self.shared = () if terms is None else tuple(f.shape[1] == 1 for f in terms.factors)
        self.widths = () if terms is None else tuple(f.shape[3] for f in terms.factors)
        self.u_first = () if terms is None else tuple(u.first for u in terms.u)
        self.rank_step = rank_step(max(self.ranks)) if terms is not None else 16
        # One stage holds all terms of a gated product, or one term.
        self.terms_of_stage = self.terms if gate is not None else min(self.terms, 1)
        # Where in shared memory the words of a tile's rows are.
        self.place = LINE
        self.run_end = LINE + words_of_rows(schedule.heights)
        self.w_rows = self.parts * schedule.features
        self.w_copies = 1 if contract == 2 and not interpreted else self.w_rows // 64

    def name(self):
        s = self.schedule
        kind = "gated" if self.gate is not None else "product"
        lora = f"_r{max(self.ranks)}" if self.terms else ""
        return f"lora_{kind}{lora}_k{self.k}_n{self.width}_f{s.features}_h{s.heights[-1]}"

    def scratch(self):
        s, r = self.schedule, self.rank_step
        u_bytes = self.chunk * r * 2
        # A stage's rows of x also hold u, so its size is a multiple of u's.
        rows = x_rows(s.heights, u_columns(self.ranks, self.parts))
        self.x_rows = pl.cdiv(rows * 128, u_bytes) * u_bytes // 128
        self.u_per_stage = self.x_rows * 128 // u_bytes
        self.b_per_stage = self.parts * 64 // r
        x_uses = [two_views((s.stages, self.x_rows, 64), self.dtype)]
        w_shape = (s.stages, self.w_rows // 64, 64, 64)
        whole = (s.stages, self.parts, s.features, 64) if self.w_copies == 1 else None
        w_uses = [two_views(w_shape, self.dtype, load_shape=whole)]
        if self.terms:
            x_uses.append(two_views((s.stages * self.u_per_stage, self.chunk, r), self.dtype))
            b_shape = (s.stages * self.b_per_stage, r, s.features)
            b_tiles = (plgpu.TilingTransform((8, r)), plgpu.SwizzleTransform(2 * r))
            w_uses.append([plgpu.SMEM(b_shape, self.dtype, transforms=b_tiles)])
        scratch = dict(
            x_stage=overlaid(*x_uses, interpreted=self.interpreted),
            w_stage=overlaid(*w_uses, interpreted=self.interpreted),
            out=plgpu.SMEM(
                (s.consumers, s.buffers, self.chunk, 64),
                self.dtype,
                transforms=(plgpu.TilingTransform((1, 64)), plgpu.SwizzleTransform(128)),
            ),
            full=plgpu.Barrier(num_arrivals=1 + self.w_copies, num_barriers=s.stages),
            empty=plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
            tile_words=plgpu.SMEM((TILES, words_of_tile(s.heights)), jnp.int32),
            tile_full=plgpu.Barrier(num_arrivals=self.word_copies(), num_barriers=TILES),
            tile_empty=plgpu.Barrier(num_arrivals=s.consumers, num_barriers=TILES),
        )
        if self.terms:
            scratch["low_rank_full"] = plgpu.Barrier(
                num_arrivals=2 * self.terms_of_stage, num_barriers=s.stages
            )
        return scratch

    def word_copies(self):
        """The tile's words in the table, or its row's place; with adapters places and run ends."""
        return (0 if self.single_rows else 1) + (2 if self.terms else int(self.single_rows))

    def sets(self) -> list[_Set]:
        """What is added after another: each term, or all terms of a gated product at once."""
        if self.gate is not None:
            return [_Set(tuple(range(self.terms)), pl.cdiv(max(self.ranks), self.rank_step))]
        return [
            _Set((term,), pl.cdiv(rank, self.rank_step)) for term, rank in enumerate(self.ranks)
        ]

    def steps_of(self, its: _Set, feature):
        """Rank steps of a set in a tile that starts at a feature: none if it has other columns."""
        start, width = self.starts[its.terms[0]], self.widths[its.terms[0]]
        if self.gate is not None or (start == 0 and width == self.width):
            return its.steps
        apart = (feature >= start + width) | (feature + self.schedule.features <= start)
        return jnp.where(apart, 0, its.steps)

    def part_of_term(self, term):
        """Which accumulator part a term of a gated product belongs to."""
        return 0 if self.gate is None or self.starts[term] == 0 else 1


class _Set(NamedTuple):
    """Terms whose products share a stage, and their number of rank steps."""

    terms: tuple[int, ...]
    steps: int


class _Piece(NamedTuple):
    """Rows that a tile variant has all of, or none."""

    number: int
    start: int
    width: int


def chunks(heights: tuple[int, ...], size: int) -> list[list[_Piece]]:
    """The pieces of a tile, cut at the heights of its variants, in chunks of `size` rows."""
    ends = sorted({*heights, *range(size, heights[-1], size)})
    starts = [0, *ends[:-1]]
    pieces = [
        _Piece(number, start, end - start)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    return [
        [piece for piece in pieces if piece.start // size == chunk]
        for chunk in range(pl.cdiv(heights[-1], size))
    ]


class _Tile(NamedTuple):
    """A tile of the table, and the feature it starts at.

    Attributes:
      slot: where in shared memory its words are.
      group, row, rows: whose rows, the first, and how many.
      k_steps: stages of the K loop; 0 for rows past the last group, which become zeros.
      feature: the first of the tile's features.
    """

    slot: jax.Array
    group: jax.Array
    row: jax.Array
    rows: jax.Array
    k_steps: jax.Array
    feature: jax.Array


def _body(layout: _Layout, *refs, **scratch):
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
    kernel = _Kernel(layout, words, x, w, y, lora, **scratch)

    @pl.when(warpgroup == s.consumers)
    def _memory():
        if s.consumers > 1:
            plgpu.set_max_registers(40, action="decrease")

        def load(i, state):
            tile, step = state
            # A carried number's divisors are forgotten.
            tile = tile._replace(feature=pl.multiple_of(tile.feature, 64))
            # Read now, needed after this tile.
            following = kernel.tile_at(program, i + 1)
            kernel.load_words(tile, program, i)
            return following, kernel.load_tile(tile, step)

        first = kernel.tile_at(program, 0)
        _, steps = lax.fori_loop(0, mine, load, (first, jnp.int32(0)))
        drain(kernel.empty, steps, s.stages)
        drain(kernel.tile_empty, mine, TILES)

    @pl.when(warpgroup < s.consumers)
    def _compute():
        if s.consumers > 1:
            plgpu.set_max_registers(232, action="increase")

        def compute(i, step):
            tile = kernel.loaded_tile(program, i)
            step = kernel.compute_tile(tile, step, warpgroup)
            plgpu.barrier_arrive(kernel.tile_empty.at[tile.slot])
            return step

        lax.fori_loop(0, mine, compute, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


class _Kernel:
    """The two roles of a program, over the kernel's references."""

    def __init__(
        self,
        layout,
        words,
        x,
        w,
        y,
        lora,
        x_stage,
        w_stage,
        out,
        full,
        empty,
        tile_words,
        tile_full,
        tile_empty,
        low_rank_full=None,
    ):
        self.layout, self.schedule = layout, layout.schedule
        self.words, self.x, self.w, self.y = words, x, w, y
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
            self.places, self.run_ends, *arrays = lora
            self.u, self.factors = arrays[: layout.terms], arrays[layout.terms :]
        self.out, self.full, self.empty, self.low_rank_full = out, full, empty, low_rank_full
        self.tile_words, self.tile_full, self.tile_empty = tile_words, tile_full, tile_empty

    def stage_of(self, step):
        return lax.rem(step, jnp.int32(self.schedule.stages))

    # Tiles and runs.

    def number(self, program, i):
        """The number in the table of a program's tile, and its slice of features."""
        # A few tiles take a slice after each other, so that they read its W at the same time.
        together, slices = self.schedule.together, self.layout.feature_tiles
        index = program + i * self.schedule.programs
        some = lax.div(index, jnp.int32(together * slices))
        place = lax.rem(index, jnp.int32(together * slices))
        return some * together + lax.rem(place, jnp.int32(together)), lax.div(
            place, jnp.int32(together)
        )

    def tile_of(self, i, words, slice_of):
        layout = self.layout
        row, rows, group = words
        k_steps = jnp.where(group < layout.groups, layout.k_steps, 0)
        group = jnp.minimum(group, layout.groups - 1)
        feature = slice_of * self.schedule.features
        return _Tile(lax.rem(i, jnp.int32(TILES)), group, row, rows, k_steps, feature)

    def tile_at(self, program, i) -> _Tile:
        """From the table; the words past its end are read, early, but nothing uses them."""
        tile, slice_of = self.number(program, i)
        if self.layout.single_rows:
            tile = jnp.minimum(tile, self.layout.rows - 1)
            words = tile, 1, group_of(self.words[tile])
        else:
            tile = jnp.minimum(tile, self.words.shape[0] // TILE_WORDS - 1)
            words = [self.words[tile * TILE_WORDS + word] for word in range(3)]
        return self.tile_of(jnp.int32(i), words, slice_of)

    def load_words(self, tile: _Tile, program, i):
        """Brings a tile's words, and those of its rows, to the consumers."""
        slot = tile.slot

        @pl.when(i >= TILES)
        def _wait():
            plgpu.barrier_wait(self.tile_empty.at[slot])

        number, _ = self.number(program, i)
        # A copy begins at a multiple of its unit, at or before the tile's first row.
        first = tile.row - lax.rem(tile.row, jnp.int32(TILE_WORDS))
        count = self.schedule.heights[-1] + TILE_WORDS
        copies = []
        if self.layout.single_rows:
            copies.append((self.words, first, count, self.layout.place))
        else:
            copies.append((self.words, number * TILE_WORDS, TILE_WORDS, 0))
            if self.layout.terms:
                copies.append((self.places, first, count, self.layout.place))
        if self.layout.terms:
            copies.append((self.run_ends, first, count, self.layout.run_end))
        for source, first, count, destination in copies:
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(first, count)],
                self.tile_words.at[slot, pl.ds(destination, count)],
                self.tile_full.at[slot],
            )

    def loaded_tile(self, program, i) -> _Tile:
        """The same from shared memory."""
        slot = lax.rem(i, jnp.int32(TILES))
        plgpu.barrier_wait(self.tile_full.at[slot])
        tile, slice_of = self.number(program, i)
        if self.layout.single_rows:
            words = tile, 1, group_of(self.tile_words[slot, self.word_of(self.layout.place, tile)])
        else:
            words = [self.tile_words[slot, word] for word in range(3)]
        return self.tile_of(i, words, slice_of)

    @staticmethod
    def word_of(first, row):
        """Where the word of a tile's first row is, of those that begin at `first`."""
        return first + lax.rem(row, jnp.int32(TILE_WORDS))

    def run_at(self, tile: _Tile, row):
        """The slot of a row of the tile, and the end of its run."""
        place = self.tile_words[tile.slot, self.word_of(self.layout.place, tile.row) + row]
        end = self.tile_words[tile.slot, self.word_of(self.layout.run_end, tile.row) + row]
        return slot_of(place), end - tile.row

    def adapted_rows(self, tile: _Tile):
        """The rows to look for runs in: none if the whole tile is one without an adapter."""
        slot, end = self.run_at(tile, 0)
        return jnp.where((slot < 0) & (end >= tile.rows), 0, tile.rows)

    def walk_runs(self, tile: _Tile, rows, begin, visit, carry):
        """visit(slot, first, stop, carry) for the adapted runs of the chunk that begins there.

        Rows `begin` count from the tile's first, those of a run from `begin`.
        """
        end = jnp.minimum(rows, begin + self.layout.chunk)

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

    # The memory warpgroup.

    def load_tile(self, tile: _Tile, step):
        def k_loop(height, step):
            rows = pl.ds(tile.row, height)

            def k_step(k, step):
                stage = self.acquire(step)
                columns = pl.ds(k * K_STEP, K_STEP)
                plgpu.copy_gmem_to_smem(
                    self.x.at[rows, columns],
                    self.x_load.at[stage, pl.ds(0, height)],
                    self.full.at[stage],
                )
                self.load_w(tile, k, stage)
                return step + 1

            return lax.fori_loop(0, tile.k_steps, k_step, step)

        step = for_height(self.schedule.heights, tile.rows, k_loop, step)
        if self.layout.terms:
            plgpu.barrier_wait(self.tile_full.at[tile.slot])
            size, adapted = self.layout.chunk, self.adapted_rows(tile)

            def load_chunk(chunk, step):
                load = functools.partial(self.load_low_rank, tile, chunk * size)
                return self.walk_runs(tile, adapted, chunk * size, load, step)

            step = lax.fori_loop(0, lax.div(adapted + size - 1, size), load_chunk, step)
            # All its warps have read the words before a copy of its own replaces them.
            plgpu.commit_smem()
        return step

    def acquire(self, step):
        stage = self.stage_of(step)

        @pl.when(step >= self.schedule.stages)
        def _wait():
            plgpu.barrier_wait(self.empty.at[stage])

        return stage

    def load_w(self, tile, k, stage):
        layout, features = self.layout, self.schedule.features
        columns = pl.ds(k * K_STEP, K_STEP)
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
                destination = self.w_load.at[stage, block]
                plgpu.copy_gmem_to_smem(source(part, place, 64), destination, barrier)
        elif layout.parts == 1:
            plgpu.copy_gmem_to_smem(source(0, 0, features), self.w_load.at[stage, 0], barrier)
        else:
            both = source(slice(None), 0, features)
            plgpu.copy_gmem_to_smem(both, self.w_load.at[stage], barrier)

    def load_low_rank(self, tile, begin, slot, first, stop, step):
        del first, stop
        layout = self.layout
        rows = pl.ds(tile.row + begin, layout.chunk)

        def load_set(its, j, step):
            stage = self.acquire(step)
            barrier = self.low_rank_full.at[stage]
            first_rank = pl.multiple_of(j * layout.rank_step, layout.rank_step)
            for place, term in enumerate(its.terms):
                group = 0 if layout.shared[term] else tile.group
                column = tile.feature - (0 if layout.gate is not None else layout.starts[term])
                plgpu.copy_gmem_to_smem(
                    self.factors[term].at[
                        slot,
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
                    self.u_load.at[stage * layout.u_per_stage + place],
                    barrier,
                )
            return step + 1

        for its in layout.sets():
            load = functools.partial(load_set, its)
            step = lax.fori_loop(0, layout.steps_of(its, tile.feature), load, step)
        return step

    # The consumer warpgroups.

    def compute_tile(self, tile: _Tile, step, warpgroup):
        multiply = functools.partial(self.multiply, tile, warpgroup)
        sums, step = for_height(self.schedule.heights, tile.rows, multiply, step)
        adapted = self.adapted_rows(tile) if self.layout.terms else 0
        for number, chunk in enumerate(self.layout.chunks):
            first = chunk[0]
            part = tuple(tuple(total[piece.number] for piece in chunk) for total in sums)
            if self.layout.terms:
                add = functools.partial(self.add_low_rank, tile, chunk, warpgroup)
                part, step = self.walk_runs(tile, adapted, first.start, add, (part, step))
            store = functools.partial(self.store, tile, warpgroup, number, chunk, part)
            if first.start < self.schedule.heights[0]:
                store()
            else:
                pl.when(tile.rows > first.start)(store)
        return step

    def multiply(self, tile, warpgroup, height, step):
        """The base product: each accumulator in pieces, which mean nothing from `height` on."""
        s, layout = self.schedule, self.layout
        blocks = layout.parts * s.blocks

        def k_loop(*accumulators):
            def k_step(k, step):
                stage = self.stage_of(step)
                plgpu.barrier_wait(self.full.at[stage])
                rows = self.x_tiles.at[stage, pl.ds(0, height)].T
                for i, accumulator in enumerate(accumulators):
                    features = self.w_tiles.at[stage, self.block_of(warpgroup, i)]
                    if layout.contract == 1:
                        features = features.T
                    plgpu.wgmma(accumulator, features, rows)
                # All but the products just issued have ended: the stage before is free.
                plgpu.wgmma_wait(blocks)

                @pl.when(k > 0)
                def _release():
                    plgpu.barrier_arrive(self.empty.at[self.stage_of(step + (s.stages - 1))])

                return step + 1

            end = lax.fori_loop(0, tile.k_steps, k_step, step)
            plgpu.wgmma_wait(0)

            @pl.when(tile.k_steps > 0)
            def _release():
                plgpu.barrier_arrive(self.empty.at[self.stage_of(end + (s.stages - 1))])

            return tuple(accumulator[...] for accumulator in accumulators)

        sums = pl.run_scoped(k_loop, *[plgpu.ACC((64, height)) for _ in range(blocks)])

        def cut(total, piece):
            if piece.start < height:
                return total[:, piece.start : piece.start + piece.width]
            return total[:, : piece.width] + tile.rows.astype(jnp.float32)

        pieces = [piece for chunk in layout.chunks for piece in chunk]
        return tuple(tuple(cut(t, piece) for piece in pieces) for t in sums), step + tile.k_steps

    def block_of(self, warpgroup, i):
        """Which 64-feature block of a stage is accumulator i of a warpgroup."""
        s = self.schedule
        part, block = divmod(i, s.blocks)
        return part * (s.features // 64) + warpgroup * s.blocks + block

    def add_low_rank(self, tile, chunk, warpgroup, slot, first, stop, carry):
        del slot
        sets = self.layout.sets()
        add = functools.partial(self.add_set, chunk, warpgroup, len(sets[0].terms), first, stop)
        steps = [self.layout.steps_of(its, tile.feature) for its in sets]
        if len(sets) == 1:
            return add(steps[0], carry)

        def add_one(number, carry):
            # The same code for all of them.
            its = functools.reduce(
                lambda found, i: jnp.where(number == i, steps[i], found), range(len(sets)), 0
            )
            return lax.cond(its > 0, functools.partial(add, its), lambda carry: carry, carry)

        return lax.fori_loop(0, len(sets), add_one, carry)

    def add_set(self, chunk, warpgroup, terms, first, stop, steps, carry):
        """Adds terms that share their rank steps to the rows [first, stop) of a chunk."""
        s, layout = self.schedule, self.layout
        sums, step = carry
        begin = chunk[0].start
        places = [
            (term, i, p)
            for term in range(terms)
            for i in range(layout.parts * s.blocks)
            if layout.gate is None or i // s.blocks == layout.part_of_term(term)
            for p in range(len(chunk))
        ]

        def products(*deltas):
            def add(j, step):
                stage = self.stage_of(step)
                plgpu.barrier_wait(self.low_rank_full.at[stage])
                for delta, (term, i, p) in zip(deltas, places, strict=True):
                    feature = (warpgroup * s.blocks + i % s.blocks) * 64
                    b = self.b.at[stage * layout.b_per_stage + term, :, pl.ds(feature, 64)]
                    rows = pl.ds(chunk[p].start - begin, chunk[p].width)
                    u = self.u_tiles.at[stage * layout.u_per_stage + term, rows]
                    plgpu.wgmma(delta, b.T, u.T)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(self.empty.at[stage])
                return step + 1

            lax.fori_loop(0, steps, add, step)
            return tuple(delta[...] for delta in deltas)

        accumulators = [plgpu.ACC((64, chunk[p].width)) for _, _, p in places]
        deltas = pl.run_scoped(products, *accumulators)

        def added(inside):
            total = [list(pieces) for pieces in sums]
            for delta, (_, i, p) in zip(deltas, places, strict=True):
                total[i][p] = inside(chunk[p], sums[i][p] + delta, sums[i][p])
            return tuple(map(tuple, total))

        def of_run(piece, new, old):
            offset = begin - piece.start
            return jnp.where(self.between(piece.width, first + offset, stop + offset), new, old)

        whole = (first == 0) & (stop == layout.chunk)
        sums = lax.cond(whole, lambda: added(lambda piece, new, old: new), lambda: added(of_run))
        return sums, step + steps

    @staticmethod
    def between(width, first, stop):
        """Which columns of [64, width] are in [first, stop)."""
        column = plgpu.broadcasted_iota(jnp.int32, (64, width), 1, layout=plgpu.Layout.WGMMA)
        return (column >= first) & (column < stop)

    def store(self, tile, warpgroup, number, chunk, sums):
        """Writes the tile's own rows of one chunk: [64 features, rows] turned to [rows, 64]."""
        s, layout = self.schedule, self.layout
        begin, rows = chunk[0].start, sum(piece.width for piece in chunk)
        count = jnp.clip(tile.rows - begin, 0, rows)
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
                total = total.astype(layout.dtype)
                turned = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
                buffer.at[pl.ds(piece.start - begin, piece.width)].T[...] = turned
            plgpu.commit_smem()
            column = tile.feature + (warpgroup * s.blocks + block) * 64
            store_rows(buffer, self.y, tile.row + begin, count, rows, pl.ds(column, 64))
