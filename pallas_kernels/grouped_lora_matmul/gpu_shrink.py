"""The Hopper kernel of the low-rank inner product: u = s · x·Aᵀ of each row's slot and group.

A run (rows of one group and one slot) is one small product with its own A, so A and x are read
once for each run, and a row never meets another slot's numbers. One unit of work is a piece of a
run, or, for few rows, a block of rows with the runs in it.

    D = A · xᵀ : [64 ranks, rows], all parts of the same columns of x, summed over K in order

Parts of other columns have sums of their own, one after another, in ranks of their own.

A part has a term for each rank class, all in the same columns of u: a run has a slot of one class,
and its A alone is loaded. What the largest class has more ranks is loaded as zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables, group_of, slot_of
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import ShrinkLayout, Span
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import (
    BLOCK_OF_ROWS,
    SHRINK_STEPS,
    ShrinkSchedule,
)
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.memory import from_first, views_of
from pallas_kernels.hopper.store import store_rows, store_turned
from pallas_kernels.layered import LAYER_OPERANDS, layer_operands, merged, number_of


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["first", "rank"]
)
@dataclasses.dataclass(frozen=True)
class Columns:
    """u of one term: columns [first, first + rank) of an array that terms share.

    The array's other columns, and rows without a slot of the term, may hold anything.
    """

    array: jax.Array
    first: int
    rank: int

    def __jax_array__(self) -> jax.Array:
        return self.array[:, self.first : self.first + self.rank]


def shrink_kernel(
    x,
    tables: Tables,
    factors,
    scalings,
    firsts: tuple[int, ...],
    starts: tuple[int, ...],
    schedule: ShrinkSchedule,
    *,
    interpreted=False,
):
    """u of each term.

    Args:
      x: [M, K]. factors: [S, G or 1, R, width] each, those of all parts class by class.
        scalings: float32 [S, G or 1] each. Both may be `Layered`.
      firsts: the first slot of each class.
      starts: the first column of x of each part, which has as many as its factors are wide.

    Returns:
      `Columns` for each term, in x's dtype. Ranks past R, up to what the schedule's tile makes of
      the part's largest class, are zero.
    """
    layout = ShrinkLayout(x, factors, scalings, firsts, starts, schedule, interpreted)
    kernel = kept_kernel(
        functools.partial(_body, layout),
        out_type=jax.ShapeDtypeStruct((x.shape[0], layout.columns), x.dtype),
        grid=(schedule.programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=layout.scratch(),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=layout.name(),
    )
    layers = layer_operands(*factors, *scalings)
    u = kernel(
        *layers,
        x,
        tables.place,
        tables.run_end,
        tables.pieces.count,
        tables.pieces.row,
        *(merged(factor)[0] for factor in factors),
        *(merged(scaling.reshape(-1))[0] for scaling in scalings),
    )
    ranks = (factor.shape[2] for factor in factors)
    return tuple(map(Columns, [u] * layout.terms, layout.first_columns, ranks))


class Run(NamedTuple):
    part: jax.Array  # the unit's, where parts are apart
    slot: jax.Array
    group: jax.Array
    row: jax.Array
    rows: jax.Array


def _body(layout: ShrinkLayout, *refs, **scratch):
    wait_for_kernels_before(layout.rows)
    s, terms = layout.schedule, layout.terms
    count = LAYER_OPERANDS * layout.layered
    layer_refs, refs = refs[:count], refs[count:]
    x, place, run_end, piece_count, piece_row, *refs = refs
    factors, scalings, u = refs[:terms], refs[terms : 2 * terms], refs[-1]
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    views = {
        f"{name}_views": views_of(scratch.pop(f"{name}_stage"), 2, interpreted=layout.interpreted)[
            0
        ]
        for name in ("x", "a")
    }

    def kernel():
        # Each role reads the layer's number, beside the first run's place: not one after the other.
        layer = number_of(layer_refs)
        return Shrinker(layout, layer, x, factors, scalings, u, **views, **scratch)

    if s.block is None:
        count = piece_count[piece_count.shape[0] - 1]

        def for_runs(handle):
            for_pieces(layout, program, count, place, run_end, piece_row, *by_step(handle))

    else:
        for_runs = functools.partial(for_blocks, layout, program, place, run_end)

    @pl.when(warpgroup == 1)
    def _memory():
        for_runs(kernel().load_run)

    @pl.when(warpgroup == 0)
    def _compute():
        for_runs(kernel().compute_run)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def for_pieces(layout: ShrinkLayout, program, count, place, run_end, piece_row, begin, handle):
    """state = handle(run, following, state) for each of a program's pieces; at first begin(run).

    What is read of a piece is read while those before it are worked on. The one that follows the
    last has no rows.
    """
    programs = layout.schedule.programs
    units = _units_of_program(count, program, programs)

    def rows_of(i):
        """The first row of a piece, and of the one after it, which may be of the same run."""
        number, last = program + i * programs, piece_row.shape[0] - 1
        return tuple(piece_row[jnp.minimum(its, last)] for its in (number, number + 1))

    def piece_at(i, row, after):
        found, end = place[row], run_end[row]
        end = jnp.where(after > row, jnp.minimum(end, after), end)
        rows = jnp.where(i < units, end - row, 0)
        return Run(jnp.int32(0), slot_of(found), group_of(found), row, rows)

    def unit(i, carried):
        run, rows, state = carried
        following, after = piece_at(i + 1, *rows), rows_of(i + 2)
        return following, after, handle(run, following, state)

    first = piece_at(0, *rows_of(0))
    lax.fori_loop(0, units, unit, (first, rows_of(1), begin(first)))


def by_step(handle):
    """For `for_pieces`: step = handle(run, step)."""
    return lambda run: jnp.int32(0), lambda run, following, step: handle(run, step)


def for_blocks(layout: ShrinkLayout, program, place, run_end, handle):
    """step = handle(run, step) for each adapted run of a program's blocks of rows: the last one."""
    s, apart = layout.schedule, jnp.int32(layout.parts_apart)
    units = _units_of_program(layout.units, program, s.programs)

    def block_of(i):
        number = program + i * s.programs
        begin = jnp.minimum(lax.div(number, apart) * s.block, layout.rows - 1)
        return lax.rem(number, apart), begin, jnp.minimum(begin + s.block, layout.rows)

    return for_units(units, block_of, place, run_end, handle)


def for_units(units, block_of, place, run_end, handle, begin=None, end=None):
    """step = handle(run, step) for each adapted run of a program's units, of at most so many rows.

    Args:
      block_of: of a unit's number, its part, its first row and the one past its last.
      begin, end: called with its number before a unit's first run, and after its last.

    Returns:
      The last step.
    """

    def run_at(part, row, past):
        found = place[row]
        rows = jnp.minimum(jnp.minimum(run_end[row], past) - row, BLOCK_OF_ROWS)
        return Run(part, slot_of(found), group_of(found), row, rows)

    def ended(part, past):
        return Run(part, jnp.int32(-1), jnp.int32(0), past, jnp.int32(0))

    def unit(i, state):
        first, step = state
        part, _, past = block_of(i)
        # The last one waits for no other's words.
        following = lax.cond(
            i + 1 < units, lambda: run_at(*block_of(i + 1)), lambda: ended(part, past)
        )
        if begin is not None:
            begin(i)

        def run(state):
            found, step = state
            # Read before this run is worked on.
            row = found.row + found.rows
            after = lax.cond(row < past, lambda: run_at(part, row, past), lambda: ended(part, past))
            step = lax.cond(
                found.slot >= 0, lambda step: handle(found, step), lambda step: step, step
            )
            return after, step

        step = lax.while_loop(lambda state: state[0].row < past, run, (first, step))[1]
        if end is not None:
            end(i)
        return following, step

    return lax.fori_loop(0, units, unit, (run_at(*block_of(0)), jnp.int32(0)))[1]


def _units_of_program(units, program, programs: int):
    return lax.div(units - program + (programs - 1), jnp.int32(programs))


class Shrinker:
    """The two roles of a program, over the kernel's references.

    Args:
      x_views, a_views: of the stages: what copies write, what products read.
    """

    def __init__(
        self,
        layout: ShrinkLayout,
        layer,
        x,
        factors,
        scalings,
        u,
        x_views,
        a_views,
        out,
        full,
        empty,
    ):
        self.layout, self.schedule = layout, layout.schedule
        self.first_slots = [layer * count for count in layout.slots_of_layer]
        self.first_scalings = [layer * count for count in layout.scalings_of_layer]
        self.x, self.factors, self.scalings, self.u = x, factors, scalings, u
        (self.x_load, self.x_tiles), (self.a_load, self.a_tiles) = x_views, a_views
        self.out, self.full, self.empty = out, full, empty

    def stage_of(self, step):
        return lax.rem(step, jnp.int32(self.schedule.stages))

    def load_run(self, run: Run, step, wait_for_x: Callable[[], None] | None = None):
        """Loads x and A of a run's steps.

        Args:
          wait_for_x: waits for x, of one span, if there is none when this warpgroup starts.
        """

        def k_loop(height, first_step):
            load = functools.partial(self.load_steps, first_step)
            rows = functools.partial(self.load_rows, run, height)
            factors, begin = functools.partial(self.load_factors, run), 0
            if wait_for_x is not None:
                (span,) = self.layout.spans
                # Until there is x, all of A that stages have room for.
                begin = jnp.where(first_step == 0, min(span.k_steps, self.schedule.stages), 0)
                load(factors, begin=0, end=begin)
                pl.when(first_step == 0)(wait_for_x)
                load(rows, begin=0, end=begin)
            load(rows, factors, begin=begin)
            return first_step + self.layout.k_steps

        return for_height(self.schedule.heights, run.rows, k_loop, step)

    def load_steps(self, first_step, *loads, begin, end=None):
        """What functions load of each block of the steps; of the first span from `begin` on, to
        `end` if that is given."""

        # One warp issues copies too slowly; each of the four takes its part of every stage.
        @plgpu.warp_map
        def _load(warp):
            step, first = first_step, begin
            for span in self.layout.spans:

                def k_step(k, step, span=span):
                    stage = self.stage_of(step)

                    @pl.when(step >= self.schedule.stages)
                    def _wait():
                        plgpu.barrier_wait(self.empty.at[stage])

                    column = (k * SHRINK_STEPS + warp) * 64
                    for load in loads:
                        load(span, column, stage, warp)
                    return step + 1

                last = span.k_steps if end is None else end
                step, first = lax.fori_loop(first, last, k_step, step + first), 0

    def load_rows(self, run: Run, height, span: Span, column, stage, block):
        plgpu.copy_gmem_to_smem(
            self.x.at[pl.ds(run.row, height), pl.ds(span.start + column, 64)],
            self.x_load.at[stage, block, pl.ds(0, height)],
            self.full.at[stage],
        )

    def load_factors(self, run: Run, span: Span, column, stage, block):
        layout, barrier = self.layout, self.full.at[stage]

        def load_factor(part, term, slot):
            group = run.group if layout.groups[term] > 1 else 0
            # Past the ranks of its class: zeros.
            ranks = from_first(layout.owned[part], slot)
            first = layout.first[part] - 64 * span.low + block * layout.a_ranks
            place = pl.ds(first, layout.owned[part])
            plgpu.copy_gmem_to_smem(
                self.factors[term].at[
                    self.first_slots[term] + slot, group, ranks, pl.ds(column, 64)
                ],
                self.a_load.at[stage, place],
                barrier,
            )

        def load_part(part):
            for its, term in layout.terms_of(part):
                load = functools.partial(load_factor, part, term, its.own(run.slot))
                its.when(run.slot, load)

        for part in span.parts:
            load = functools.partial(load_part, part)
            if layout.schedule.apart:
                pl.when(run.part == part)(load)
            else:
                load()

    def wait_for_stage(self, stage):
        """Until products can read it."""
        plgpu.barrier_wait(self.full.at[stage])

    def compute_run(self, run: Run, step):
        # Read while the factors are on their way.
        scalings = [self.scaling(run, part) for part in range(self.layout.parts)]
        # A stage's products run on while the next stage's begin, if loads have stages enough.
        lag = int(self.schedule.stages > 3)

        def products(height, first_step):
            def k_loop(span, accumulators, step):
                def k_step(k, step):
                    stage = self.stage_of(step)
                    self.wait_for_stage(stage)
                    for part in range(SHRINK_STEPS):
                        rows = self.x_tiles.at[stage, part, pl.ds(0, height)].T
                        for block, accumulator in enumerate(accumulators):
                            ranks = pl.ds(64 * block + part * self.layout.a_ranks, 64)
                            plgpu.wgmma(accumulator, self.a_tiles.at[stage, ranks], rows)
                    # All but the products of `lag` stages have ended, and what these read is free.
                    plgpu.wgmma_wait(lag * SHRINK_STEPS * len(accumulators))
                    pl.when(k >= lag)(functools.partial(self.release, step - lag))
                    return step + 1

                end = lax.fori_loop(0, span.k_steps, k_step, step)
                if lag:
                    plgpu.wgmma_wait(0)
                    self.release(end - 1)
                return end

            def sums(*accumulators):
                step, free = first_step, list(accumulators)
                for span in self.layout.spans:
                    its, free = free[: span.blocks], free[span.blocks :]
                    step = k_loop(span, its, step)
                return tuple(accumulator[...] for accumulator in accumulators)

            count = sum(span.blocks for span in self.layout.spans)
            totals = list(pl.run_scoped(sums, *[plgpu.ACC((64, height))] * count))
            of_block = [[] for _ in range(self.layout.blocks)]
            for span in self.layout.spans:
                for block in range(span.low, span.low + span.blocks):
                    of_block[block].append((span, totals.pop(0)))
            for block, its in enumerate(of_block):
                self.store(run, block, self.scaled(run, scalings, block, its))
            return first_step + self.layout.k_steps

        return for_height(self.schedule.heights, run.rows, products, step)

    def release(self, step):
        plgpu.barrier_arrive(self.empty.at[self.stage_of(step)])

    def store(self, run: Run, block, total):
        height = total.shape[1]
        u = total.astype(self.layout.dtype)
        buffer = self.out.at[block % 2]
        # A run starts with the first buffer again, so all stores before it must have read.
        plgpu.wait_smem_to_gmem(min(block, 1), wait_read_only=True)
        store_turned(buffer.at[pl.ds(0, height)], u)
        plgpu.commit_smem()
        column = 64 * block
        if self.layout.schedule.apart:
            column += 64 * self.layout.blocks * run.part
        store_rows(buffer, self.u, run.row, run.rows, height, pl.ds(column, 64))

    def scaling(self, run: Run, part):
        found = None
        for its, term in self.layout.terms_of(part):
            groups = self.layout.scaling_groups[term]
            place = its.some(run.slot) * groups + (run.group if groups > 1 else 0)
            value = self.scalings[term][self.first_scalings[term] + place]
            found = value if found is None else its.select(run.slot, value, found)
        return found

    def scaled(self, run: Run, scalings, block, totals):
        """Each part's sum times its scaling, on its own ranks of a block.

        Args:
          totals: the spans that have ranks of the block, and their sums.
        """
        layout = self.layout
        if layout.schedule.apart:
            ((_, total),) = totals
            own = scalings[0]
            for part in range(1, layout.parts):
                own = jnp.where(run.part == part, scalings[part], own)
            return total * own
        rank = plgpu.broadcasted_iota(jnp.int32, totals[0][1].shape, 0, layout=plgpu.Layout.WGMMA)
        scaled = None
        for part in range(layout.parts):
            first = layout.first[part] - 64 * block
            if first >= 64 or first + layout.owned[part] <= 0:
                continue
            (total,) = [total for span, total in totals if part in span.parts]
            its = total * scalings[part]
            scaled = its if scaled is None else jnp.where(rank >= first, its, scaled)
        return scaled
