"""The Hopper kernel of two of the gradients' sums, which reads rows once for both:

    v[t] = s · right[t] · Bᵀ of each row's slot and group, and Σ left[t] ⊗ right[t] of each bucket.

A bucket is a slot and a group. Its unit of work goes through 256 features after another, and in
them through its rows, 64 at a time. Two warpgroups multiply left and right as `gpu_outer` does,
half of the features each; one multiplies right and B, for all rows side by side:

    D = leftᵀ · right : [64 ranks, 128 features] over all rows, for each 256 features
    V = right · Bᵀ : [64 rows, ranks] over all features, for each 64 rows

Sums are in the order, and have the bits, of `gpu_outer` and `gpu_shrink`.

V has no room in registers from some number of rows on. Such a bucket is divided into parts: each
has a chunk of the rows for V, and each of its slices of features is D of one part alone. So parts
read more together than the bucket has, and are done by as many programs.
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

from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.grouped_lora_matmul.gpu_outer import FEATURES, ROWS, keep_rows
from pallas_kernels.grouped_lora_matmul.gpu_rows import Runs
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import from_first, overlaid, two_views, views_of
from pallas_kernels.hopper.store import store_rows, whole_lines

STAGES = {16: 4, 32: 3}  # by columns of V
B_STAGES = 3
BLOCKS = FEATURES // 64
OUTERS = 2  # warpgroups, half of the blocks each
SHRINKER, MEMORY = OUTERS, OUTERS + 1
CHUNK = 320  # rows of V that registers hold: there is code for each number of steps
PART = 256  # rows of V of each part, where a bucket has several
WORDS = 8  # of a unit


class _Unit(NamedTuple):
    """A part of a bucket.

    Attributes:
      part, parts: its number, and how many the bucket has.
      first, stop: the bucket's runs. begin, end: the rows of the first of them.
    """

    bucket: jax.Array
    part: jax.Array
    parts: jax.Array
    first: jax.Array
    stop: jax.Array
    begin: jax.Array
    end: jax.Array

    def has(self, number):
        """Whether D of a slice, or V of a chunk, of this number is the part's."""
        return lax.rem(number, self.parts) == self.part


class _Strip(NamedTuple):
    """The features of one term; in a kernel, of the one with a number that is known there.

    Attributes:
      start: of `right`. slices: of `FEATURES` each. before: slices of the terms before.
      left: the first column of its block of 64 in `left`.
    """

    number: jax.Array | int
    start: jax.Array | int
    slices: jax.Array | int
    before: jax.Array | int
    left: jax.Array | int


def _strips_of(columns, spans) -> list[_Strip]:
    strips, before = [], 0
    for number, ((start, width), (first, _)) in enumerate(zip(spans, columns, strict=True)):
        slices = pl.cdiv(width, FEATURES)
        strips.append(_Strip(number, start, slices, before, first // 64 * 64))
        before += slices
    return strips


def units_of(runs: Runs, rows: int, slots: int):
    """int32 [units * WORDS]: the words of each unit, the last of which is how many there are.

    Long ones come first.

    Args:
      rows: of all buckets. slots: that a row may have.
    """
    buckets = runs.first.shape[0]
    last = runs.begin.shape[0] - 1
    has_rows = runs.stop > runs.first
    head, tail = (jnp.clip(its, 0, last) for its in (runs.first, runs.stop - 1))
    begin, end = (jnp.where(has_rows, its[head], 0) for its in (runs.begin, runs.end))
    # At most: others' rows may be between its runs.
    extent = jnp.where(has_rows, runs.end[tail] - begin, 0)
    parts = jnp.where(extent > CHUNK, -(-extent // PART), 1)
    length = jnp.minimum(-(-extent // ROWS), CHUNK // ROWS + 1)
    number = np.arange(buckets, dtype=np.int32)
    earlier = (length[None, :] > length[:, None]) | (
        (length[None, :] == length[:, None]) & (number[None, :] < number[:, None])
    )
    before = jnp.sum(jnp.where(earlier, parts[None, :], 0), axis=1)
    unit = np.arange(buckets + slots * (rows // PART), dtype=np.int32)
    inside = unit[:, None] - before[None, :]
    bucket = jnp.sum(jnp.where((inside >= 0) & (inside < parts[None, :]), number, 0), axis=1)
    words = (bucket, unit - before[bucket], parts[bucket], runs.first[bucket], runs.stop[bucket])
    count = jnp.broadcast_to(jnp.sum(parts), unit.shape)
    words = jnp.stack([*words, begin[bucket], end[bucket], count], axis=1)
    return words.astype(jnp.int32).reshape(-1)


def shrink_outer_kernel(
    left,
    columns: tuple[tuple[int, int], ...],
    right,
    spans: tuple[tuple[int, int], ...],
    runs: Runs,
    factors,
    scalings,
    tile: int,
    *,
    interpreted=False,
):
    """v of each row and term, and the sums of left[t] ⊗ right[t] of each bucket and term.

    Args:
      left: [M, a multiple of 64], u of all terms. columns: first and rank of each, which are in
        one block of 64.
      right: [M, all spans' columns]. spans: start and width of each term, which no two share.
      runs: of the buckets slot * G + group.
      factors: [S, G, rank, width] of each term. scalings: float32 [S, G or 1].
      tile: columns of v for each term, one of `STAGES`; no rank is larger.

    Returns:
      [M, a multiple of 64], where v of a term begins after `tile` columns of each before it, with
      zeros past its rank, and what is in other columns or rows without a slot may be anything;
      [buckets, rank, width] of each term. All are of right's dtype.
    """
    dtype, terms = right.dtype, len(spans)
    slots, groups = factors[0].shape[:2]
    strips, scaling_groups = _strips_of(columns, spans), [its.shape[1] for its in scalings]
    words = units_of(runs, right.shape[0], slots)
    programs = min(PROGRAMS, words.shape[0] // WORDS)
    ring = STAGES[tile]
    stages = {
        "left": (ring, ROWS, 64),
        "right": (ring, BLOCKS, ROWS, 64),
        "b": (B_STAGES, BLOCKS, tile, 64),
    }

    def body(left, right, words, begins, ends, *refs, **scratch):
        views = {
            name: views_of(scratch.pop(f"{name}_stage"), 2, interpreted=interpreted)[0]
            for name in stages
        }
        of_terms = zip(refs[terms : 2 * terms], scaling_groups, strict=True)
        operands = left, right, refs[:terms], tuple(of_terms)
        out = refs[2 * terms], refs[2 * terms + 1 :]
        roles = _Roles(strips, columns, groups, tile, begins, ends, operands, out, views, **scratch)
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        turns, left_over = (f(words[WORDS - 1], jnp.int32(programs)) for f in (lax.div, lax.rem))

        def place_in(turn):
            """Who has a long unit in one turn has a short one in the next."""
            return jnp.where(turn & 1 == 1, programs - 1 - program, program)

        mine = turns + (place_in(turns) < left_over)

        def unit_at(i):
            place = (i * programs + place_in(i)) * WORDS
            return _Unit(*(words[place + word] for word in range(len(_Unit._fields))))

        def for_units(handle, state):
            lax.fori_loop(0, mine, lambda i, state: handle(unit_at(i), state), state)

        zero = jnp.int32(0)
        pl.when(warpgroup == MEMORY)(lambda: for_units(roles.load, (zero, zero)))

        @pl.when(warpgroup == SHRINKER)
        def _shrink():
            for_units(roles.shrink, (zero, zero))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup < OUTERS)
        def _outer():
            for_units(functools.partial(roles.outer, warpgroup), zero)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def buffer(*shape):
        transforms = (
            plgpu.TilingTransform((1, shape[-1])),
            plgpu.SwizzleTransform(shape[-1] * dtype.itemsize),
        )
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    v_columns = 64 * pl.cdiv(terms * tile, 64)
    kernel = kept_kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((right.shape[0], v_columns), dtype),
            *(
                jax.ShapeDtypeStruct((slots * groups, rank, whole_lines(width, 64)), dtype)
                for (_, rank), (_, width) in zip(columns, spans, strict=True)
            ),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=OUTERS + 2,
        thread_name="warpgroup",
        scratch_types=dict(
            **{
                f"{name}_stage": overlaid(two_views(shape, dtype), interpreted=interpreted)
                for name, shape in stages.items()
            },
            sums=buffer(OUTERS, BLOCKS // OUTERS, 64, 64),
            v_rows=buffer(CHUNK, tile),
            full=plgpu.Barrier(num_arrivals=1 + BLOCKS, num_barriers=ring),
            clean=plgpu.Barrier(num_arrivals=OUTERS),
            ready=plgpu.Barrier(num_arrivals=OUTERS, num_barriers=ring),
            empty=plgpu.Barrier(num_arrivals=OUTERS + 1, num_barriers=ring),
            b_full=plgpu.Barrier(num_arrivals=BLOCKS, num_barriers=B_STAGES),
            b_empty=plgpu.Barrier(num_arrivals=1, num_barriers=B_STAGES),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"lora_shrink_outer_r{max(rank for _, rank in columns)}"
        f"_n{sum(width for _, width in spans)}_x{terms}",
    )
    flat = (its.reshape(-1) for its in scalings)
    v, *sums = kernel(left, right, words, runs.begin, runs.end, *factors, *flat)
    return v, tuple(its[:, :, :width] for its, (_, width) in zip(sums, spans, strict=True))


class _Roles:
    """What the warpgroups of a program do with a unit, over the kernel's references.

    All go through the same stages: for each slice all rows of the bucket, where its D is the
    unit's, else those of the unit's chunk of the first run alone. Then, where a bucket has more
    runs, for each of the unit's chunks of them, all slices.
    """

    def __init__(
        self,
        strips,
        columns,
        groups,
        tile,
        begins,
        ends,
        operands,
        out,
        views,
        sums,
        v_rows,
        full,
        clean,
        ready,
        empty,
        b_full,
        b_empty,
    ):
        self.strips, self.columns, self.groups, self.tile = strips, columns, groups, tile
        self.slices = sum(strip.slices for strip in strips)
        self.begins, self.ends = begins, ends
        self.left, self.right, self.factors, self.scalings = operands
        self.v, self.out = out
        (self.left_load, self.left_tiles), (self.right_load, self.right_tiles) = (
            views["left"],
            views["right"],
        )
        self.b_load, self.b_tiles = views["b"]
        self.sums, self.v_rows = sums, v_rows
        self.full, self.clean, self.ready, self.empty = full, clean, ready, empty
        self.ring = STAGES[tile]
        self.b_full, self.b_empty = b_full, b_empty

    # --- in which order ---

    def over_rows(self, unit: _Unit, visit, state):
        """state = visit(row, kept, state) for each step over the bucket's rows; kept: its own."""
        state = _over_run(unit.begin, unit.end, visit, state)

        def run(number, state):
            return _over_run(self.begins[number], self.ends[number], visit, state)

        return lax.fori_loop(unit.first + 1, unit.stop, run, state)

    def chunk_of(self, unit: _Unit):
        """(row, rows) of the unit's chunk of the first run."""
        row = unit.begin + unit.part * self.rows_of_chunk(unit)
        return row, jnp.clip(unit.end - row, 0, self.rows_of_chunk(unit))

    def rows_of_chunk(self, unit: _Unit):
        return jnp.where(unit.parts > 1, PART, CHUNK)

    def over_slices(self, visit, state):
        """state = visit(number, strip, slice of the strip, state) for each slice."""

        def one(number, state):
            strip = self.strip_at(lambda its: number >= its.before)
            return visit(number, strip, number - strip.before, state)

        return lax.fori_loop(0, self.slices, one, state)

    def strip_at(self, reached) -> _Strip:
        """The last strip that is reached."""
        found = self.strips[0]
        for its in self.strips[1:]:
            is_reached = reached(its)
            found = _Strip(*(jnp.where(is_reached, *both) for both in zip(its, found, strict=True)))
        return found

    def at_strip(self, number, action):
        """action(number) where numbers of strips are Python's."""
        for its in range(len(self.strips)):
            pl.when(number == its)(functools.partial(action, its))

    def over_other_chunks(self, unit: _Unit, visit, state):
        """state = visit(row, rows, state) for each of the unit's chunks of other runs."""
        rows = self.rows_of_chunk(unit)

        def run(number, carried):
            before, state = carried
            begin, end = self.begins[number], self.ends[number]
            count = _whole_units(end - begin, rows)

            def chunk(i, state):
                row = begin + i * rows
                return lax.cond(
                    unit.has(before + i),
                    lambda state: visit(row, jnp.minimum(end - row, rows), state),
                    lambda state: state,
                    state,
                )

            return before + count, lax.fori_loop(0, count, chunk, state)

        first = _whole_units(unit.end - unit.begin, rows)
        return lax.fori_loop(unit.first + 1, unit.stop, run, (first, state))[1]

    # --- the warpgroup that loads ---

    def load(self, unit: _Unit, state):
        """state: (stages of rows, stages of B) so far."""

        def of_chunk(row, rows, is_d, number, strip, place, state):
            step, b_step = state
            load_b = functools.partial(self.load_b, unit, strip, place)
            b_step = lax.cond(rows > 0, load_b, lambda b_step: b_step, b_step)
            load = functools.partial(self.load_rows, strip, place)
            step = lax.cond(
                is_d(number),
                lambda step: self.over_rows(unit, load, step),
                lambda step: _over_run(row, row + rows, load, step),
                step,
            )
            return step, b_step

        def chunk(row, rows, state):
            only_v = functools.partial(of_chunk, row, rows, lambda number: False)
            return self.over_slices(only_v, state)

        first = functools.partial(of_chunk, *self.chunk_of(unit), unit.has)
        return self.over_other_chunks(unit, chunk, self.over_slices(first, state))

    def stage_of(self, step):
        return lax.rem(step, jnp.int32(self.ring))

    def load_rows(self, strip: _Strip, number, row, kept, step):
        del kept
        stage = self.stage_of(step)
        pl.when(step >= self.ring)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
        rows, barrier = pl.ds(row, ROWS), self.full.at[stage]
        ranks = self.left.at[rows, pl.ds(strip.left, 64)]
        plgpu.copy_gmem_to_smem(ranks, self.left_load.at[stage], barrier)
        for block in range(BLOCKS):
            features = pl.ds(strip.start + number * FEATURES + 64 * block, 64)
            destination = self.right_load.at[stage, block]
            plgpu.copy_gmem_to_smem(self.right.at[rows, features], destination, barrier)
        return step + 1

    def load_b(self, unit: _Unit, strip: _Strip, number, b_step):
        stage = lax.rem(b_step, jnp.int32(B_STAGES))
        pl.when(b_step >= B_STAGES)(lambda: plgpu.barrier_wait(self.b_empty.at[stage]))
        slot, group = self.place_of(unit)

        def load(term):
            for block in range(BLOCKS):
                features = pl.ds(number * FEATURES + 64 * block, 64)
                plgpu.copy_gmem_to_smem(
                    # Past its ranks and features: zeros.
                    self.factors[term].at[slot, group, from_first(self.tile, slot), features],
                    self.b_load.at[stage, block],
                    self.b_full.at[stage],
                )

        self.at_strip(strip.number, load)
        return b_step + 1

    def place_of(self, unit: _Unit):
        """The bucket's slot and group."""
        groups = jnp.int32(self.groups)
        return lax.div(unit.bucket, groups), lax.rem(unit.bucket, groups)

    # --- the warpgroups of D ---

    def outer(self, warpgroup, unit: _Unit, step):
        blocks = BLOCKS // OUTERS

        def sum_slice(strip, place, step):
            def sums(*accumulators):
                add = functools.partial(self.add, warpgroup, accumulators, step)
                end = self.over_rows(unit, add, step)
                plgpu.wgmma_wait(0)
                pl.when(end > step)(lambda: self.release(end - 1))
                return tuple(accumulator[...] for accumulator in accumulators), end

            totals, end = pl.run_scoped(sums, *[plgpu.ACC((64, 64))] * blocks)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for block, total in enumerate(totals):
                self.sums[warpgroup, block] = total.astype(self.sums.dtype)
            plgpu.commit_smem()
            first = place * FEATURES + 64 * blocks * warpgroup
            self.at_strip(strip.number, functools.partial(self.store_sums, warpgroup, unit, first))
            return end

        def pass_on(steps, step):
            return lax.fori_loop(0, steps, lambda _, step: self.pass_on(step), step)

        _, rows = self.chunk_of(unit)
        of_chunk = _whole_units(rows, ROWS)

        def of_slice(number, strip, place, step):
            sum_its = functools.partial(sum_slice, strip, place)
            pass_its = functools.partial(pass_on, of_chunk)
            return lax.cond(unit.has(number), sum_its, pass_its, step)

        def chunk(row, rows, step):
            del row
            return pass_on(_whole_units(rows, ROWS) * self.slices, step)

        return self.over_other_chunks(unit, chunk, self.over_slices(of_slice, step))

    def pass_on(self, step):
        """A stage that only V has use for."""
        stage = self.stage_of(step)
        plgpu.barrier_wait(self.full.at[stage])
        plgpu.barrier_arrive(self.ready.at[stage])
        self.release(step)
        return step + 1

    def release(self, step):
        plgpu.barrier_arrive(self.empty.at[self.stage_of(step)])

    def add(self, warpgroup, accumulators, first_step, row, kept, step):
        del row
        stage = self.stage_of(step)
        first = warpgroup * len(accumulators)
        plgpu.barrier_wait(self.full.at[stage])

        @pl.when(kept < ROWS)
        def _clear_others():
            pl.when(warpgroup == 0)(lambda: keep_rows(self.left_tiles.at[stage], kept))
            for block in range(len(accumulators)):
                keep_rows(self.right_tiles.at[stage, first + block], kept)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.clean)
            plgpu.barrier_wait(self.clean)

        plgpu.barrier_arrive(self.ready.at[stage])
        for block, accumulator in enumerate(accumulators):
            features = self.right_tiles.at[stage, first + block]
            plgpu.wgmma(accumulator, self.left_tiles.at[stage].T, features)
        # All but these have ended, and what those before read is free.
        plgpu.wgmma_wait(len(accumulators))
        pl.when(step > first_step)(lambda: self.release(step - 1))
        return step + 1

    def store_sums(self, warpgroup, unit: _Unit, feature, term: int):
        first, rank = self.columns[term]
        for block in range(BLOCKS // OUTERS):
            plgpu.copy_smem_to_gmem(
                self.sums.at[warpgroup, block, pl.ds(first % 64, rank)],
                self.out[term].at[unit.bucket, :, pl.ds(feature + 64 * block, 64)],
            )

    # --- the warpgroup of V ---

    def shrink(self, unit: _Unit, state):
        """state: (stages of rows, stages of B) so far."""

        def count(row, kept, steps):
            del row, kept
            return steps + 1

        of_bucket = self.over_rows(unit, count, jnp.int32(0))

        def leave(state):
            """All that D alone has use for."""
            step, b_step = state
            slices = _whole_units(self.slices - unit.part, unit.parts)
            return self.leave(of_bucket * slices, step), b_step

        size = self.rows_of_chunk(unit)

        def run(number, carried):
            """Of all runs in one place: code for chunks is long."""
            past, state = carried
            is_first = number == unit.first
            begin, end = lax.cond(
                is_first,
                lambda: (unit.begin, unit.end),
                lambda: (self.begins[number], self.ends[number]),
            )
            count = _whole_units(end - begin, size)

            def chunk(i, state):
                row = begin + i * size
                rows = jnp.minimum(end - row, size)
                before = jnp.where(is_first, _whole_units(i * size, ROWS), 0)
                after = of_bucket - before - _whole_units(rows, ROWS)
                after = jnp.where(is_first, after, 0)
                heights = tuple(range(ROWS, CHUNK + 1, ROWS))
                multiply = functools.partial(self.multiply, unit, row, rows, before, after)
                return lax.cond(
                    unit.has(past + i),
                    lambda state: for_height(heights, rows, multiply, state),
                    lambda state: state,
                    state,
                )

            return past + count, lax.fori_loop(0, count, chunk, state)

        _, rows = self.chunk_of(unit)
        state = lax.cond(rows == 0, leave, lambda state: state, state)
        return lax.fori_loop(unit.first, unit.stop, run, (jnp.int32(0), state))[1]

    def leave(self, steps, step):
        def one(_, step):
            plgpu.barrier_wait(self.ready.at[self.stage_of(step)])
            self.release(step)
            return step + 1

        return lax.fori_loop(0, steps, one, step)

    def multiply(self, unit: _Unit, row, rows, before, after, height: int, state):
        """V of up to `height` rows.

        Args:
          before, after: steps of other rows in slices whose D is the unit's.
        """
        count = height // ROWS

        def of_strip(number, state):
            strip = self.strip_at(lambda its: number >= its.number)
            scaling = self.scaling(unit, number)

            def sums(*accumulators):
                def of_slice(place, state):
                    step, b_step = state
                    is_d = unit.has(strip.before + place).astype(jnp.int32)
                    step = self.leave(before * is_d, step)
                    b_stage = lax.rem(b_step, jnp.int32(B_STAGES))
                    plgpu.barrier_wait(self.b_full.at[b_stage])
                    for accumulator in accumulators:
                        step = self.multiply_rows(accumulator, b_stage, step)
                    plgpu.barrier_arrive(self.b_empty.at[b_stage])
                    return self.leave(after * is_d, step), b_step + 1

                end = lax.fori_loop(0, strip.slices, of_slice, state)
                return tuple(accumulator[...] for accumulator in accumulators), end

            totals, end = pl.run_scoped(sums, *[plgpu.ACC((ROWS, self.tile))] * count)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for place, total in enumerate(totals):
                its_rows = pl.ds(place * ROWS, ROWS)
                self.v_rows[its_rows] = (total * scaling).astype(self.v_rows.dtype)
            plgpu.commit_smem()
            # Nobody can compute where to before there are sums: it would wait in registers.
            none = jnp.minimum(end[1], 0)
            self.store_v(number, row + none, rows + none, height - ROWS)
            return end

        return lax.fori_loop(0, len(self.strips), of_strip, state)

    def store_v(self, number, row, rows, whole: int):
        """Of so many rows for certain, and of some of the next `ROWS`."""
        columns = pl.ds(number * self.tile, self.tile)
        if whole:
            its = self.v.at[pl.ds(row, whole), columns]
            plgpu.copy_smem_to_gmem(self.v_rows.at[pl.ds(0, whole)], its, commit_group=False)
        others = self.v_rows.at[pl.ds(whole, ROWS)]
        store_rows(others, self.v, row + whole, rows - whole, ROWS, columns)

    def scaling(self, unit: _Unit, number):
        """That of the bucket, of a strip's number."""
        slot, _ = self.place_of(unit)
        found = None
        for its, (scalings, groups) in enumerate(self.scalings):
            value = scalings[unit.bucket if groups > 1 else slot]
            found = value if found is None else jnp.where(number == its, value, found)
        return found

    def multiply_rows(self, accumulator, b_stage, step):
        stage = self.stage_of(step)
        plgpu.barrier_wait(self.ready.at[stage])

        def multiply(block, _):
            features = self.right_tiles.at[stage, block]
            plgpu.wgmma(accumulator, features, self.b_tiles.at[b_stage, block].T)

        lax.fori_loop(0, BLOCKS, multiply, None)
        plgpu.wgmma_wait(0)
        self.release(step)
        return step + 1


def _over_run(begin, end, visit, state):
    """state = visit(row, kept, state) for each step over a run's rows."""

    def rows(k, state):
        return visit(begin + k * ROWS, end - begin - k * ROWS, state)

    return lax.fori_loop(0, _whole_units(end - begin, ROWS), rows, state)


def _whole_units(count, unit):
    return lax.div(count + (unit - 1), jnp.int32(unit))
