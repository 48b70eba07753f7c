"""The Hopper kernel of the low-rank inner product: u = s · x·Aᵀ of each row's slot and group.

A run (rows of one group and one slot) is one small product with its own A, so A and x are read
once for each run, and a row never meets another slot's numbers. One unit of work is a piece of a
run, or, for few rows, a block of rows with the runs in it.

    D = A · xᵀ : [64 ranks, rows], all terms of one x together, summed over K in order
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.grouped_lora_matmul.gpu_memory import overlaid, two_views, views_of
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables, group_of, slot_of
from pallas_kernels.grouped_lora_matmul.gpu_schedule import (
    PIECE,
    SHRINK_STEPS,
    ShrinkSchedule,
    rank_tile,
)
from pallas_kernels.grouped_lora_matmul.gpu_store import store_rows


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["first", "rank"]
)
@dataclasses.dataclass(frozen=True)
class Columns:
    """u of one term: columns [first, first + rank) of an array that terms of one x share.

    The array's other columns, and rows without an adapter, may hold anything.
    """

    array: jax.Array
    first: int
    rank: int

    def __getitem__(self, rows) -> Columns:
        return Columns(self.array[rows], self.first, self.rank)

    def __jax_array__(self) -> jax.Array:
        return self.array[:, self.first : self.first + self.rank]


def shrink_kernel(
    x,
    tables: Tables,
    factors,
    scalings,
    start,
    width,
    schedule: ShrinkSchedule,
    *,
    interpreted=False,
):
    """u of each term, for terms that share the columns [start, start + width) of x.

    Args:
      x: [M, K]. factors: [S, G or 1, R, width] each. scalings: float32 [S, G or 1] each.

    Returns:
      `Columns` for each term, in x's dtype. Ranks past R, up to the next 16, are zero.
    """
    layout = _Layout(x, factors, scalings, start, width, schedule, interpreted)
    kernel = plgpu.kernel(
        functools.partial(_body, layout),
        out_type=jax.ShapeDtypeStruct((x.shape[0], 64 * layout.blocks), x.dtype),
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
        kernel_name=f"lora_shrink_r{max(layout.ranks)}_k{width}_x{len(factors)}",
    )
    u = kernel(
        x,
        tables.place,
        tables.run_end,
        *tables.pieces,
        *factors,
        *(s.reshape(-1) for s in scalings),
    )
    return tuple(
        Columns(u, first, rank) for first, rank in zip(layout.first, layout.ranks, strict=True)
    )


def packed_columns(ranks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where each term's ranks start in the packed u, and how many columns it owns."""
    width = rank_tile(max(ranks))
    owned = tuple(-(-rank // width) * width for rank in ranks)
    return tuple(sum(owned[:term]) for term in range(len(ranks))), owned


class _Layout:
    """Sizes of one kernel, and its memory."""

    def __init__(self, x, factors, scalings, start, width, schedule, interpreted):
        self.interpreted = interpreted
        self.schedule, self.start, self.dtype = schedule, start, x.dtype
        self.rows = x.shape[0]
        self.terms = len(factors)
        self.ranks = tuple(factor.shape[2] for factor in factors)
        self.groups = tuple(factor.shape[1] for factor in factors)
        self.scaling_groups = tuple(s.shape[1] for s in scalings)
        self.first, self.owned = packed_columns(self.ranks)
        self.blocks = pl.cdiv(self.first[-1] + self.owned[-1], 64)
        self.k_steps = pl.cdiv(width, 64 * SHRINK_STEPS)
        self.units = pl.cdiv(self.rows, schedule.block or 1)

    def scratch(self):
        s = self.schedule
        x_shape = (s.stages, SHRINK_STEPS, s.heights[-1], 64)
        a_shape = (s.stages, SHRINK_STEPS, 64 * self.blocks, 64)
        stores = (plgpu.TilingTransform((1, 64)), plgpu.SwizzleTransform(128))
        return dict(
            x_stage=overlaid(two_views(x_shape, self.dtype), interpreted=self.interpreted),
            a_stage=overlaid(two_views(a_shape, self.dtype), interpreted=self.interpreted),
            out=plgpu.SMEM((2, s.heights[-1], 64), self.dtype, transforms=stores),
            full=plgpu.Barrier(num_arrivals=SHRINK_STEPS * (1 + self.terms), num_barriers=s.stages),
            empty=plgpu.Barrier(num_arrivals=1, num_barriers=s.stages),
        )


class _Run(NamedTuple):
    slot: jax.Array
    group: jax.Array
    row: jax.Array
    rows: jax.Array


def _body(layout: _Layout, x, place, run_end, piece_count, piece_row, *refs, **scratch):
    s, terms = layout.schedule, layout.terms
    factors, scalings, u = refs[:terms], refs[terms : 2 * terms], refs[-1]
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    units = layout.units
    if s.block is None:
        units = piece_count[piece_count.shape[0] - 1]
    mine = lax.div(units - program + (s.programs - 1), jnp.int32(s.programs))
    kernel = _Kernel(layout, x, factors, scalings, u, **scratch)

    def for_runs(handle):
        """handle(run, step) for each adapted run of this program's units."""

        def run_at(row, end):
            found = place[row]
            rows = jnp.minimum(run_end[row], end) - row
            return _Run(slot_of(found), group_of(found), row, rows)

        def ended(end):
            return _Run(jnp.int32(-1), jnp.int32(0), end, jnp.int32(0))

        def unit(i, step):
            if s.block is None:
                begin = piece_row[program + i * s.programs]
                end = jnp.minimum(run_end[begin], lax.div(begin, jnp.int32(PIECE)) * PIECE + PIECE)
            else:
                begin = (program + i * s.programs) * s.block
                end = jnp.minimum(begin + s.block, layout.rows)

            def run(state):
                found, step = state
                # Read before this run is worked on.
                row = found.row + found.rows
                following = lax.cond(row < end, lambda: run_at(row, end), lambda: ended(end))
                step = lax.cond(
                    found.slot >= 0,
                    lambda step: handle(found, step),
                    lambda step: step,
                    step,
                )
                return following, step

            return lax.while_loop(
                lambda state: state[0].row < end, run, (run_at(begin, end), step)
            )[1]

        lax.fori_loop(0, mine, unit, jnp.int32(0))

    @pl.when(warpgroup == 1)
    def _memory():
        for_runs(kernel.load_run)

    @pl.when(warpgroup == 0)
    def _compute():
        for_runs(kernel.compute_run)
        plgpu.wait_smem_to_gmem(0)


class _Kernel:
    """The two roles of a program, over the kernel's references."""

    def __init__(self, layout, x, factors, scalings, u, x_stage, a_stage, out, full, empty):
        self.layout, self.schedule = layout, layout.schedule
        self.x, self.factors, self.scalings, self.u = x, factors, scalings, u
        ((self.x_load, self.x_tiles),) = views_of(x_stage, 2, interpreted=layout.interpreted)
        ((self.a_load, self.a_tiles),) = views_of(a_stage, 2, interpreted=layout.interpreted)
        self.out, self.full, self.empty = out, full, empty

    def stage_of(self, step):
        return lax.rem(step, jnp.int32(self.schedule.stages))

    def load_run(self, run: _Run, step):
        def k_loop(height, first_step):
            # One warp issues copies too slowly; each of the four takes its part of every stage.
            @plgpu.warp_map
            def _load(warp):
                def k_step(k, step):
                    stage = self.stage_of(step)

                    @pl.when(step >= self.schedule.stages)
                    def _wait():
                        plgpu.barrier_wait(self.empty.at[stage])

                    self.load_part(run, height, (k * SHRINK_STEPS + warp) * 64, stage, warp)
                    return step + 1

                lax.fori_loop(0, self.layout.k_steps, k_step, first_step)

            return first_step + self.layout.k_steps

        return for_height(self.schedule.heights, run.rows, k_loop, step)

    def load_part(self, run: _Run, height, column, stage, part):
        layout, barrier = self.layout, self.full.at[stage]
        plgpu.copy_gmem_to_smem(
            self.x.at[pl.ds(run.row, height), pl.ds(layout.start + column, 64)],
            self.x_load.at[stage, part, pl.ds(0, height)],
            barrier,
        )
        for term in range(layout.terms):
            group = run.group if layout.groups[term] > 1 else 0
            ranks = pl.ds(0, layout.owned[term])
            plgpu.copy_gmem_to_smem(
                self.factors[term].at[run.slot, group, ranks, pl.ds(column, 64)],
                self.a_load.at[stage, part, pl.ds(layout.first[term], layout.owned[term])],
                barrier,
            )

    def compute_run(self, run: _Run, step):

        def product(height, step):
            def k_loop(*accumulators):
                def k_step(k, step):
                    stage = self.stage_of(step)
                    plgpu.barrier_wait(self.full.at[stage])
                    for part in range(SHRINK_STEPS):
                        rows = self.x_tiles.at[stage, part, pl.ds(0, height)].T
                        for block, accumulator in enumerate(accumulators):
                            ranks = pl.ds(64 * block, 64)
                            plgpu.wgmma(accumulator, self.a_tiles.at[stage, part, ranks], rows)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(self.empty.at[stage])
                    return step + 1

                lax.fori_loop(0, self.layout.k_steps, k_step, step)
                return tuple(accumulator[...] for accumulator in accumulators)

            accumulators = [plgpu.ACC((64, height)) for _ in range(self.layout.blocks)]
            for block, total in enumerate(pl.run_scoped(k_loop, *accumulators)):
                self.store(run, block, total)
            return step + self.layout.k_steps

        return for_height(self.schedule.heights, run.rows, product, step)

    def store(self, run: _Run, block, total):
        height = total.shape[1]
        u = (total * self.scale(run, block, total.shape)).astype(self.layout.dtype)
        buffer = self.out.at[block % 2]
        # A run starts with the first buffer again, so all stores before it must have read.
        plgpu.wait_smem_to_gmem(min(block, 1), wait_read_only=True)
        buffer.at[pl.ds(0, height)].T[...] = plgpu.layout_cast(u, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        store_rows(buffer, self.u, run.row, run.rows, height, pl.ds(64 * block, 64))

    def scale(self, run: _Run, block, shape):
        """Each term's scaling on its own ranks of a block."""
        layout = self.layout
        inside = [
            term
            for term in range(layout.terms)
            if layout.first[term] < 64 * (block + 1)
            and layout.first[term] + layout.owned[term] > 64 * block
        ]

        def scaling(term):
            groups = layout.scaling_groups[term]
            return self.scalings[term][run.slot * groups + (run.group if groups > 1 else 0)]

        factor = scaling(inside[0])
        if len(inside) > 1:
            rank = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            for term in inside[1:]:
                here = rank >= layout.first[term] - 64 * block
                factor = jnp.where(here, scaling(term), factor)
        return factor
