"""The Hopper kernel of the adapters' gradients: the sum of left[t] ⊗ right[t] over a bucket's rows.

One unit of work is one bucket and a slice of the features of a span. Rows come 64 at a time from
the first of each of the bucket's runs; those of the last step that belong to others become zeros in
shared memory, so nothing of theirs is multiplied. The sum runs over the rows in order, in one
accumulator. Two warpgroups multiply, half of the features each: a bucket of few rows takes them as
long as it takes to wait for one thing after the other.

    D = rightᵀ · left : [512 features, 64 ranks], the columns of all terms of one span together

Columns of u that no term of the span owns stay in columns of D that nobody stores.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_outer_rows import (
    ROWS,
    clear_others,
    load_rows,
    over_run,
)
from pallas_kernels.grouped_lora_matmul.gpu_rows import Runs
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import whole
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import overlaid, two_views, views_of
from pallas_kernels.hopper.store import store_turned, transforms_of_lines, whole_lines

CONSUMERS = 2
STAGES = {4: 2, 3: 3, 2: 4}  # by how many blocks of 64 features a consumer has
TURNS = 8  # of each program, at least, where a consumer has more blocks than two


class _Strip(NamedTuple):
    """The units of one span in a bucket: a slice of features after another, for each block.

    Attributes:
      start, width: of the span, in `right`.
      terms: whose span it is. rank: where their first columns of `left` begin.
      blocks: of 64 columns. slices: of a unit's features. units: how many come before.
    """

    start: int
    width: int
    terms: list[int]
    rank: int
    blocks: int
    slices: int
    units: int


def _strips(columns, spans, features: int) -> list[_Strip]:
    strips, units = [], 0
    for start, width in dict.fromkeys(spans):
        terms = [term for term, span in enumerate(spans) if span == (start, width)]
        rank = min(columns[term][0] for term in terms)
        blocks = pl.cdiv(max(sum(columns[term]) for term in terms) - rank, 64)
        slices = pl.cdiv(width, features)
        strips.append(_Strip(start, width, terms, rank, blocks, slices, units))
        units += blocks * slices
    return strips


def blocks_of_consumer(buckets: int, columns, spans) -> int:
    """Of 64 features: many, where programs have enough units so, and few columns are nobody's."""

    def size(blocks):
        features = 64 * CONSUMERS * blocks
        strips = _strips(columns, spans, features)
        units = buckets * (strips[-1].units + strips[-1].blocks * strips[-1].slices)
        return units < TURNS * PROGRAMS, features * sum(strip.slices for strip in strips), -blocks

    most, fewest = max(STAGES), min(STAGES)
    best = min(range(fewest, most + 1), key=size)
    return fewest if size(best)[0] else best


def ranks_of(strips: list[_Strip], columns) -> int:
    """How many columns of D some term owns, in whole units of 8."""
    ends = (sum(columns[term]) - strip.rank for strip in strips for term in strip.terms)
    return whole(min(max(ends), 64), 8)


class _Unit(NamedTuple):
    """A bucket, and which strip's block of columns and features; first of `left`, `right` too."""

    bucket: jax.Array
    strip: jax.Array
    block: jax.Array
    feature: jax.Array
    rank: jax.Array
    column: jax.Array


def _unit_at(strips, features: int, index) -> _Unit:
    units = strips[-1].units + strips[-1].blocks * strips[-1].slices
    bucket, rest = lax.div(index, jnp.int32(units)), lax.rem(index, jnp.int32(units))

    def unit_of(number, strip):
        inside = rest - strip.units
        block = lax.div(inside, jnp.int32(strip.slices))
        feature = lax.rem(inside, jnp.int32(strip.slices)) * features
        first = strip.rank + 64 * block
        return _Unit(bucket, jnp.int32(number), block, feature, first, strip.start + feature)

    found = unit_of(0, strips[0])
    for number, strip in enumerate(strips[1:], 1):
        its = unit_of(number, strip)
        both = zip(its, found, strict=True)
        found = _Unit(*(jnp.where(rest >= strip.units, *values) for values in both))
    return found


class _Roles:
    """What the warpgroups of a program do with a unit; `step` counts its stages so far."""

    def __init__(
        self,
        strips: list[_Strip],
        columns,
        runs: Runs,
        operands,
        out,
        left,
        right,
        interpreted,
        stored,
        full,
        clean,
        empty,
    ):
        self.strips, self.columns, self.interpreted = strips, columns, interpreted
        self.runs, self.out = runs, out
        self.left, self.right = operands
        # Of each, what copies write, and what products read.
        (self.left_load, self.left_tiles), (self.right_load, self.right_tiles) = left, right
        self.stored = stored
        self.full, self.clean, self.empty = full, clean, empty
        self.stages = self.left_load.shape[0]
        self.blocks = self.right_load.shape[1] // CONSUMERS

    def stage_of(self, step):
        return lax.rem(step, jnp.int32(self.stages))

    def over_rows(self, bucket, visit, step):
        """step = visit(row, kept, step) for each step over the bucket's rows; see `over_run`."""

        def run(number, step):
            return over_run(self.runs.begin[number], self.runs.end[number], visit, step)

        return lax.fori_loop(self.runs.first[bucket], self.runs.stop[bucket], run, step)

    def load(self, its: _Unit, step):
        def load(row, kept, step):
            stage = self.stage_of(step)
            pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
            memory = self.left_load.at[stage], self.right_load.at[stage], self.full.at[stage]
            load_rows(self.left, its.rank, self.right, its.column, row, kept, *memory)
            return step + 1

        return self.over_rows(its.bucket, load, step)

    def multiply(self, warpgroup, its: _Unit, step):
        def sums(*accumulators):
            add = functools.partial(self.add, warpgroup, accumulators)
            end = self.over_rows(its.bucket, add, step)
            return tuple(accumulator[...] for accumulator in accumulators), end

        totals, end = pl.run_scoped(sums, *[plgpu.ACC((64, 64))] * self.blocks)
        self.store(warpgroup, its, totals)
        return end

    def add(self, warpgroup, accumulators, row, kept, step):
        del row
        stage, first = self.stage_of(step), warpgroup * self.blocks
        plgpu.barrier_wait(self.full.at[stage])

        @pl.when(kept < ROWS)
        def _clear():
            memory = self.left_load.at[stage], self.right_load.at[stage]
            mine = first, self.blocks, self.clean.at[stage]
            clear_others(warpgroup, kept, *memory, *mine, interpreted=self.interpreted)

        for block, accumulator in enumerate(accumulators):
            features = self.right_tiles.at[stage, first + block]
            plgpu.wgmma(accumulator, features.T, self.left_tiles.at[stage])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.empty.at[stage])
        return step + 1

    def store(self, warpgroup, its: _Unit, totals):
        """Turns the blocks of [64 features, ranks], and writes them."""
        feature, dtype = its.feature + 64 * self.blocks * warpgroup, self.stored.dtype
        buffers = [self.stored.at[warpgroup, block] for block in range(self.blocks)]
        # Those of the unit before have been read.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for buffer, total in zip(buffers, totals, strict=True):
            used = total[:, : self.stored.shape[2]].astype(dtype)
            store_turned(buffer, used, swizzled=bool(transforms_of_lines(dtype)))
        plgpu.commit_smem()
        for block, buffer in enumerate(buffers):
            self.store_block(buffer, its, pl.ds(feature + 64 * block, 64))

    def store_block(self, buffer, its: _Unit, features):
        """Stores each term's own rows of a block of ranks."""
        for number, strip in enumerate(self.strips):
            for block in range(strip.blocks):
                begin = strip.rank + 64 * block
                store = functools.partial(self.store_ranks, buffer, strip, begin, its, features)
                pl.when((its.strip == number) & (its.block == block))(store)
        plgpu.commit_smem_to_gmem_group()

    def store_ranks(self, buffer, strip: _Strip, begin: int, its: _Unit, features):
        for term in strip.terms:
            first, rank = self.columns[term]
            low, high = max(first, begin), min(first + rank, begin + 64)
            if low < high:
                plgpu.copy_smem_to_gmem(
                    buffer.at[pl.ds(low - begin, high - low)],
                    self.out[term].at[its.bucket, pl.ds(low - first, high - low), features],
                    commit_group=False,
                )


def outer_kernel(
    left,
    columns: tuple[tuple[int, int], ...],
    right,
    spans: tuple[tuple[int, int], ...],
    runs: Runs,
    dtype,
    *,
    interpreted=False,
):
    """Sums of u[t] ⊗ right[t, start : start + width] over the rows of each bucket's runs.

    Args:
      left: [M, a multiple of 64], u of all terms. columns: first and rank of each; a first column
        is a multiple of 8, the copy engine's unit.
      right: [M, all spans' columns]. spans: start and width of each term.
      dtype: what float32 sums are rounded to.

    Returns:
      `dtype` [buckets, rank, width] of each term; zeros for buckets without rows.
    """
    buckets = runs.first.shape[0]
    exact = jnp.dtype(dtype).itemsize > 2  # buffers are twice as large
    blocks = min(STAGES) if exact else blocks_of_consumer(buckets, columns, spans)
    stages, features = STAGES[blocks], 64 * CONSUMERS * blocks
    strips = _strips(columns, spans, features)
    units = buckets * sum(strip.blocks * strip.slices for strip in strips)
    programs = min(PROGRAMS, units)
    left_shape, right_shape = (stages, ROWS, 64), (stages, CONSUMERS * blocks, ROWS, 64)

    def body(left, right, *refs, left_stage, right_stage, **scratch):
        runs, out = Runs(*refs[:4]), refs[4:]
        stage_views = [
            views_of(stage, 2, interpreted=interpreted)[0] for stage in (left_stage, right_stage)
        ]
        known = strips, columns, runs
        roles = _Roles(*known, (left, right), out, *stage_views, interpreted, **scratch)
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        mine = lax.div(units - program + (programs - 1), jnp.int32(programs))

        def for_units(handle):
            def unit(i, step):
                index = program + i * programs
                return handle(_unit_at(strips, features, index), step)

            lax.fori_loop(0, mine, unit, jnp.int32(0))

        pl.when(warpgroup == CONSUMERS)(lambda: for_units(roles.load))

        @pl.when(warpgroup < CONSUMERS)
        def _compute():
            for_units(functools.partial(roles.multiply, warpgroup))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = kept_kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct((buckets, rank, whole_lines(width, 64)), dtype)
            for (_, rank), (_, width) in zip(columns, spans, strict=True)
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            left_stage=overlaid(two_views(left_shape, right.dtype), interpreted=interpreted),
            right_stage=overlaid(two_views(right_shape, right.dtype), interpreted=interpreted),
            stored=plgpu.SMEM(
                (CONSUMERS, blocks, ranks_of(strips, columns), 64),
                dtype,
                transforms=transforms_of_lines(dtype),
            ),
            full=plgpu.Barrier(num_arrivals=1 + CONSUMERS * blocks, num_barriers=stages),
            clean=plgpu.Barrier(num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"lora_outer_r{max(rank for _, rank in columns)}"
        f"_n{sum(strip.width for strip in strips)}_x{len(columns)}",
    )
    sums = kernel(left, right, *runs)
    return tuple(its[:, :, :width] for its, (_, width) in zip(sums, spans, strict=True))
