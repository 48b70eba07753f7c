"""The Hopper kernel of paged attention: one pass over a request's cache, in order of position.

A unit is a tile of tokens of one request and the query heads that share keys and values: 64 rows of
(token, head), which read the cache once together. Grouped heads and latents differ only in what a
position's columns are: lines of 64, of which the first are keys and some (the latent's own, or
those after the keys) are values.

    for each block of 64 positions:
        S = Q · Kᵀ                 [64 rows, 64 positions]
        P = exp2(S - maximum)      rounded to the cache's dtype
        O = O · correction + P · V

Every row's numbers are its own: blocks come in order of position from the first, and one that lies
wholly past a row's position (or before its window) changes no bit of it. So bits do not depend on
the tile, the chunk or the batch. Values of positions that no row of the tile sees are set to zero,
as they may be anything, and 0 x NaN is NaN.

Where one warpgroup has all of O's columns, sums begin anew at every multiple of the split's size,
and are joined in order (`gpu_join.py`). In a large batch a program has all of a unit's sequence and
joins as it goes. In a small one units are runs of splits, as many as there are programs; they store
each split's sums, and a second kernel joins them. Both do the same to a row, so bits do not depend
on which it is, either.

With many columns of values (latents) two warpgroups have half of O's columns each, and take blocks
in pairs. Each makes S and P of one block; they agree on the maximum, and P goes to the other by the
memory of the block's rotary keys, which nobody needs any more. Shared memory holds but one pair, so
that it is loaded and given back in small pieces: first those that are used last by one consumer.
Sums of latents that two warpgroups share are never split: one program has the whole sequence, of
any length, with one running sum.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.accumulate import continued
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import drain, overlaid, two_views, views_of
from pallas_kernels.hopper.store import store_rows, whole_lines
from pallas_kernels.paged_attention.gpu_join import join_kernel, mean
from pallas_kernels.paged_attention.gpu_sizes import BLOCK, LINE, ROWS, Sizes
from pallas_kernels.paged_attention.gpu_splits import (
    Sums,
    join_split,
    memory_of_sums,
    no_sums,
    store_split,
)
from pallas_kernels.paged_attention.gpu_units import Loader, Unit, stage_of, unit_at
from pallas_kernels.paged_attention.tiles import first_of_tile, split_runs, token_tiles


def attention_kernel(sizes: Sizes, q, caches, view):
    """Attends.

    Args:
      q: [T, H, columns of all keys]. caches: [P, page, heads of the cache, columns], one for each
        of the sizes' lines.

    Returns:
      [T, H, columns of the values] in q's dtype.
    """
    positions = view.page_tables.shape[1] * sizes.page
    s = sizes.spread_over(positions, PROGRAMS)
    tiles, units = token_tiles(view, s.tile), s.tokens * s.parts
    if s.spread:
        most = PROGRAMS // s.parts
        tiles, units = split_runs(tiles, s.split, s.window, s.spread, most), most * s.parts
    programs = min(PROGRAMS, units)
    one_split = s.splits(positions) == 1
    shape = (s.tokens, s.heads) if s.boxes else (s.parts, s.tokens * s.group)
    if not s.boxes:
        q = q.reshape(s.tokens, s.parts, s.group, -1).swapaxes(0, 1).reshape(*shape, -1)
    columns = whole_lines(s.value_lines * LINE, LINE)
    y = jax.ShapeDtypeStruct((*shape, columns), q.dtype)
    kernel = plgpu.kernel(
        functools.partial(_body, s, programs, len(caches), one_split),
        out_type=memory_of_sums(s) if s.spread else [y],
        grid=(programs,),
        grid_names=("program",),
        num_threads=s.consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(s, q.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=s.name(),
    )
    y, *rest = kernel(*tiles, view.page_tables, q, *caches)
    if s.spread:
        y = join_kernel(s, view, first_of_tile(view, s.tile), y, *rest, q.dtype)
    y = y[..., : s.value_lines * LINE]
    if not (s.spread or s.boxes):
        y = y.reshape(s.parts, s.tokens, s.group, -1).swapaxes(0, 1)
    return y.reshape(s.tokens, s.heads, -1)


def _scratch(s: Sizes, dtype):
    """Shared memory and barriers."""
    tiled = (plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(128))
    rows = (s.tile, s.group) if s.boxes else (ROWS,)
    scratch = dict(
        # The result takes the place of the queries.
        q_stage=overlaid(
            *(
                two_views((lines, ROWS, LINE), dtype, load_shape=(lines, *rows, LINE))
                for lines in (s.key_lines, s.value_lines)
            ),
            interpreted=s.interpreted,
        ),
        stages=plgpu.SMEM((s.stages, sum(s.lines), BLOCK, LINE), dtype, transforms=tiled),
        q_full=plgpu.Barrier(num_arrivals=s.key_lines),
        scored=plgpu.Barrier(num_arrivals=s.consumers),
        stored=plgpu.Barrier(num_arrivals=s.consumers, num_barriers=1),
        full=[
            plgpu.Barrier(num_arrivals=BLOCK // s.copy * len(piece), num_barriers=s.stages)
            for piece in s.pieces(0)
        ],
        empty=[plgpu.Barrier(num_barriers=s.stages) for _ in s.pieces(0)],
    )
    if s.spread:
        half = (plgpu.TilingTransform((1, LINE // 2)), plgpu.SwizzleTransform(128))
        scratch["partial"] = plgpu.SMEM((s.value_lines, ROWS, LINE), jnp.float32, transforms=half)
    if s.consumers > 1:
        scratch["exchanged"] = plgpu.SMEM((s.consumers, ROWS), jnp.float32)
        scratch["maxima"] = plgpu.Barrier(num_arrivals=s.consumers)
        scratch["weighted"] = plgpu.Barrier(num_arrivals=s.consumers)
    elif s.interpreted:
        # The interpreter multiplies only what is in shared memory.
        scratch["weights"] = plgpu.SMEM((ROWS, BLOCK), dtype)
    return scratch


def _body(
    sizes: Sizes,
    programs: int,
    cache_count: int,
    one_split: bool,
    count,
    words,
    page_tables,
    q,
    *refs,
    **scratch,
):
    caches, results = refs[:cache_count], refs[cache_count:]
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    units = count[0] * sizes.parts
    mine = lax.div(units - program + (programs - 1), jnp.int32(programs))
    loader = Loader(sizes, page_tables, caches, *(scratch[x] for x in ("stages", "full", "empty")))
    consumers = _Consumers(sizes, one_split, q, results, **scratch)

    def unit(i):
        return unit_at(sizes, words, program + i * programs)

    @pl.when(warpgroup == sizes.consumers)
    def _memory():
        if sizes.consumers > 1:
            plgpu.set_max_registers(40, action="decrease")
        steps = lax.fori_loop(0, mine, lambda i, step: loader.load(unit(i), step), jnp.int32(0))
        for empty in loader.empty:
            drain(empty, steps, sizes.stages)

    @pl.when(warpgroup < sizes.consumers)
    def _compute():
        if sizes.consumers > 1:
            plgpu.set_max_registers(232, action="increase")

        def compute(i, step):
            return consumers.compute(unit(i), i, step, warpgroup)

        lax.fori_loop(0, mine, compute, jnp.int32(0))
        pl.when(warpgroup == 0)(lambda: drain(consumers.stored, mine, 1))


class _Consumers:
    """The warpgroups that multiply, over the kernel's references."""

    def __init__(
        self,
        sizes,
        one_split,
        q,
        results,
        q_stage,
        stages,
        q_full,
        scored,
        stored,
        full,
        empty,
        partial=None,
        weights=None,
        exchanged=None,
        maxima=None,
        weighted=None,
    ):
        self.sizes, self.one_split, self.q = sizes, one_split, q
        self.results, self.partial = results, partial
        views = views_of(q_stage, 2, 2, interpreted=sizes.interpreted)
        (self.q_load, self.q_stage), (self.out_store, self.out) = views
        self.stages, self.weights = stages, weights
        self.q_full, self.scored, self.stored = q_full, scored, stored
        self.full, self.empty = full, empty
        self.exchanged, self.maxima, self.weighted = exchanged, maxima, weighted

    def compute(self, unit: Unit, i, step, warpgroup):
        s = self.sizes
        pl.when(warpgroup == 0)(functools.partial(self.load_queries, unit, i))
        plgpu.barrier_wait(self.q_full)
        attend = functools.partial(self.attend, unit, self.positions_of_rows(unit), warpgroup)

        def attend_split(split, state):
            before, step = state
            first = jnp.maximum(unit.first_round, split * s.rounds)
            end = jnp.minimum(unit.end_round, (split + 1) * s.rounds)
            sums, step = lax.fori_loop(first, end, attend, (no_sums(s), step))
            if s.spread:
                store_split(s, unit, split, sums, self.results, self.partial)
                return before, step
            return join_split(before, sums), step

        if self.one_split:
            start = no_sums(s), step
            sums, step = lax.fori_loop(unit.first_round, unit.end_round, attend, start)
        else:
            start = None if s.spread else no_sums(s), step
            sums, step = lax.fori_loop(unit.first_split, unit.end_split, attend_split, start)
        if s.spread:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.stored.at[0])
        else:
            self.finish(unit, warpgroup, sums)
        return step

    def load_queries(self, unit: Unit, i):
        @pl.when(i > 0)
        def _wait():
            plgpu.barrier_wait(self.stored.at[0])

        s = self.sizes
        for line in range(s.key_lines):
            columns, first = pl.ds(line * LINE, LINE), unit.token
            if s.boxes:
                rows = self.q.at[pl.ds(first, s.tile), self.heads_of(unit), columns]
            else:
                rows = self.q.at[unit.part, pl.ds(first * s.group, ROWS), columns]
            plgpu.copy_gmem_to_smem(rows, self.q_load.at[line], self.q_full)

    def heads_of(self, unit: Unit):
        return pl.ds(unit.part * self.sizes.group, self.sizes.group)

    def attend(self, unit: Unit, positions, warpgroup, round_, state):
        s = self.sizes
        (maximum, total, lines), step = state
        block = round_ * s.consumers + warpgroup
        scores = self.masked(positions, block, self.scores(unit, block, step, warpgroup))
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        if s.consumers > 1:
            self.exchanged[warpgroup] = new_maximum
            plgpu.barrier_arrive(self.maxima)
            plgpu.barrier_wait(self.maxima)
            new_maximum = jnp.maximum(new_maximum, self.of_consumer(1 - warpgroup))
        # Before a row's first visible block the maximum is -inf; keep the arithmetic finite.
        base = jnp.where(new_maximum == -jnp.inf, jnp.zeros_like(new_maximum), new_maximum)
        correction = jnp.exp2(maximum - base)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(base, scores.shape, [0]))
        total = total * correction + weights.sum(axis=1)
        correction = lax.broadcast_in_dim(correction, (ROWS, LINE), [0])
        lines = tuple(line * correction for line in lines)
        lines = self.add_values(warpgroup, step, weights.astype(self.stages.dtype), lines)
        return Sums(new_maximum, total, lines), step + s.consumers

    def of_consumer(self, warpgroup):
        """What a consumer has put into `exchanged`, one number for each row."""
        numbers = plgpu.load(self.exchanged.at[warpgroup], layout=plgpu.Layout.WGMMA.reduce(1))
        return plgpu.layout_cast(numbers, plgpu.Layout.WGMMA.reduce(1))

    def scores(self, unit: Unit, block, step, warpgroup):
        """Q · Kᵀ, scaled for powers of two."""
        s, stage = self.sizes, stage_of(self.sizes, step + warpgroup)
        first, stop = unit.first - block * BLOCK, unit.last + 1 - block * BLOCK

        def multiply(accumulator):
            for lines, full in zip(s.pieces(warpgroup), self.full, strict=True):
                plgpu.barrier_wait(full.at[stage])

                @pl.when((first > 0) | (stop < BLOCK))
                def _clear_others(lines=lines):
                    self.clear_values(stage, lines, first, stop)
                    plgpu.commit_smem()

                for line in lines[: s.key_lines]:
                    keys = self.stages.at[stage, line].T
                    plgpu.wgmma(accumulator, self.q_stage.at[line], keys)
            plgpu.wgmma_wait(0)
            return accumulator[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, BLOCK)))
        return scores * (s.scale * math.log2(math.e))

    def positions_of_rows(self, unit: Unit):
        """The position of each row's token."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        return unit.position + lax.div(row, jnp.int32(self.sizes.group))

    def masked(self, positions, block, scores):
        """-inf where a row may not look."""
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        last = lax.broadcast_in_dim(positions - block * BLOCK, scores.shape, [0])
        visible = column <= last
        if self.sizes.window is not None:
            visible &= column > last - self.sizes.window
        return jnp.where(visible, scores, jnp.full_like(scores, -jnp.inf))

    def add_values(self, warpgroup, step, weights, sums):
        """The sums plus P · V, of this consumer's block and then of the other's.

        Gives pieces back as their last products end.
        """
        s, half = self.sizes, len(self.full) // 2
        stage, left = stage_of(s, step + warpgroup), weights
        if s.interpreted:
            left = self.stages.at[stage, s.value_lines] if s.consumers > 1 else self.weights
        if s.consumers == 1:
            if s.interpreted:
                left[...] = weights
            lines = range(s.first_value, s.first_value + s.value_lines)
            own, others = [(self.empty[0], lines)], []
        else:
            own = list(zip(self.empty, s.pieces(warpgroup), strict=True))[:half]
            others = list(zip(self.empty, s.pieces(1 - warpgroup), strict=True))[half:]
            # Its rotary keys are past all products.
            shared = self.stages.at[stage, s.value_lines]
            shared[...] = weights
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.weighted)

        def add(accumulators):
            def multiply(left, stage, pieces):
                lines = [line for _, lines in pieces for line in lines]
                for accumulator, line in zip(accumulators, lines, strict=False):
                    plgpu.wgmma(accumulator, left, self.stages.at[stage, line])

            def give_back(stage, pieces, pending):
                for empty, lines in pieces:
                    pending = max(0, pending - len(lines))
                    plgpu.wgmma_wait(pending)
                    plgpu.barrier_arrive(empty.at[stage])

            multiply(left, stage, own)
            if others:
                other = stage_of(s, step + 1 - warpgroup)
                for full in self.full[half:]:
                    plgpu.barrier_wait(full.at[other])
                plgpu.barrier_wait(self.weighted)
                multiply(self.stages.at[other, s.value_lines], other, others[:-1])
            pending = len(accumulators)
            give_back(stage, own, pending * (1 + bool(others)))
            if others:
                give_back(other, others, pending)

        return tuple(continued(list(sums), add, s.interpreted))

    def clear_values(self, stage, lines, first, stop):
        """Zeroes the values among some lines of a block outside of [first, stop)."""
        s = self.sizes
        for line in lines:
            # Lines of values come first where there are two consumers.
            if s.consumers == 1 and line < s.first_value:
                continue
            tile = self.stages.at[stage, line]
            values = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
            seen = (row >= first) & (row < stop)
            tile[...] = jnp.where(seen, values, jnp.zeros_like(values))

    def finish(self, unit: Unit, warpgroup, sums: Sums):
        """Stores the weighted means; zeros for padding tokens."""
        s, total = self.sizes, sums.total
        if s.consumers > 1:
            self.exchanged[warpgroup] = total
        # Nobody reads the queries any more.
        plgpu.barrier_arrive(self.scored)
        plgpu.barrier_wait(self.scored)
        if s.consumers > 1:
            total = self.of_consumer(0) + self.of_consumer(1)
        total = lax.broadcast_in_dim(total, (ROWS, LINE), [0])
        lines = [warpgroup * len(sums.lines) + number for number in range(len(sums.lines))]
        for line, its in zip(lines, sums.lines, strict=True):
            self.out.at[line][...] = mean(its, total).astype(self.out.dtype)
        plgpu.commit_smem()
        for line in lines:
            self.store_line(unit, line)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.stored.at[0])

    def store_line(self, unit: Unit, line):
        s, y, columns = self.sizes, self.results[0], pl.ds(line * LINE, LINE)
        rows, first, count = self.out_store.at[line], unit.token, unit.tokens
        if s.boxes:
            store_rows(rows, y, first, count, s.tile, self.heads_of(unit), columns)
        else:
            store_rows(rows, y.at[unit.part], first * s.group, count * s.group, ROWS, columns)
