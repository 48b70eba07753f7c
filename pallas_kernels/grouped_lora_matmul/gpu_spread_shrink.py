"""Rows laid out in the order of the route, and u of those with adapters, in one kernel.

A shrink of many rows waits for memory: it reads what the kernel before has just written, top-k
times what the tokens are. Here threads load a piece's rows from where the tokens are, which the L2
holds, and store them twice: where they belong, and in a stage, for the tensor cores. Rows without
an adapter are in no piece: the copy engine lays them out.

    gather: rows of a piece -> their places, and a stage     memory: A -> the stage
    compute: u = A · the stage's rows                        spread: rows without an adapter
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_rows import Route
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Columns, Shrinker, by_step, for_pieces
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import ShrinkLayout
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import ShrinkSchedule
from pallas_kernels.grouped_lora_matmul.gpu_spread import Bare, SpreadLayout, spread
from pallas_kernels.hopper import gather
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.machine import L2, SHARED_MEMORY
from pallas_kernels.hopper.memory import views_of
from pallas_kernels.layered import layer_operands, merged, number_of

COMPUTE, MEMORY, GATHER = 0, 1, 2  # the first warpgroup of each role
SPREAD = GATHER + gather.WARPGROUPS


class _Operands(NamedTuple):
    """What the kernel reads: the route's arrays, x in lines, and all of the terms."""

    layer: tuple
    token: jax.Array
    position: jax.Array
    place: jax.Array
    run_end: jax.Array
    piece_count: jax.Array
    piece_row: jax.Array
    bare: jax.Array
    x: jax.Array
    factors: list
    scalings: list


def spread_and_shrink(
    x,
    route: Route,
    factors,
    scalings,
    firsts: tuple[int, ...],
    schedule: ShrinkSchedule,
    *,
    interpreted=False,
):
    """The x of each row, and u of each term.

    Args:
      x: [T, K]. factors, scalings, firsts: see `shrink_kernel`; all terms are of all columns of x.
      schedule: see `shrink_of_spread`.

    Returns:
      [M, K], and `Columns` for each term.
    """
    choices = route.position.shape[1]
    rows = jax.ShapeDtypeStruct((x.shape[0] * choices, x.shape[1]), x.dtype)
    starts = (0,) * (len(factors) // len(firsts))
    layout = ShrinkLayout(
        rows, factors, scalings, firsts, starts, schedule, interpreted, gather.WARPGROUPS
    )
    spread_layout = SpreadLayout(x, choices, SHARED_MEMORY - layout.bytes)
    kernel = kept_kernel(
        functools.partial(_body, layout, spread_layout),
        out_type=[
            spread_layout.result,
            jax.ShapeDtypeStruct((layout.rows, layout.columns), x.dtype),
        ],
        grid=(schedule.programs,),
        grid_names=("program",),
        num_threads=SPREAD + 1,
        thread_name="warpgroup",
        scratch_types=layout.scratch() | spread_layout.scratch(),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"lora_spread_and_{layout.name().removeprefix('lora_')}",
    )
    tables = route.tables
    operands = _Operands(
        layer_operands(*factors, *scalings),
        route.token,
        route.position.reshape(-1),
        tables.place,
        tables.run_end,
        *tables.pieces,
        spread_layout.lines_of(x),
        [merged(factor)[0] for factor in factors],
        [merged(scaling.reshape(-1))[0] for scaling in scalings],
    )
    y, u = kernel(operands)
    ranks = (factor.shape[2] for factor in factors)
    return y.reshape(rows.shape), tuple(
        map(Columns, [u] * layout.terms, layout.first_columns, ranks)
    )


def _body(
    layout: ShrinkLayout,
    spread_layout: SpreadLayout,
    given: _Operands,
    y,
    u,
    *,
    x_stage,
    a_stage,
    stage_of_row,
    stage_full,
    **scratch,
):
    wait_for_kernels_before(layout.rows)
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    views = {
        f"{name}_views": views_of(stage, 2, interpreted=layout.interpreted)[0]
        for name, stage in (("x", x_stage), ("a", a_stage))
    }
    count = given.piece_count[given.piece_count.shape[0] - 1]
    pieces = layout, program, count, given.place, given.run_end, given.piece_row

    def kernel():
        layer = number_of(given.layer)
        arrays = given.x, given.factors, given.scalings, u
        return _GatheringShrinker(layout, layer, *arrays, **views, **scratch)

    @pl.when(warpgroup == COMPUTE)
    def _compute():
        for_pieces(*pieces, *by_step(kernel().compute_run))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == MEMORY)
    def _memory():
        for_pieces(*pieces, *by_step(kernel().load_run))

    @pl.when((warpgroup >= GATHER) & (warpgroup < SPREAD))
    def _gather():
        kernel().gather_rows(given.token, y, warpgroup - GATHER, pieces)

    @pl.when(warpgroup == SPREAD)
    def _spread():
        stages = dict(stage_of_row=stage_of_row, stage_full=stage_full)
        rows = Bare(given.place, given.bare)
        spread(spread_layout, program, given.x, given.position, rows, y, **stages)


class _GatheringShrinker(Shrinker):
    """A shrink whose memory role loads A alone; rows are gathered."""

    def load_rows(self, run, height, span, column, stage, block):
        """Nothing: that is `gather_rows`."""

    def wait_for_stage(self, stage):
        """Who has stored to it has not fenced: that waits for all loads that are on their way."""
        super().wait_for_stage(stage)
        plgpu.commit_smem()

    def gather_rows(self, token, y, which, pieces):
        """One of the warpgroups' part of all pieces.

        Args:
          which: of the warpgroups, 0 or 1. pieces: arguments of `for_pieces`.
        """
        (span,) = self.layout.spans
        x_bytes, y_bytes = (its.size * its.dtype.itemsize for its in (self.x, y))
        again = y.shape[0] > self.x.shape[0] and x_bytes < L2 < y_bytes
        lines = gather.Lines(self.x, token, y, span.width, which, again, self.layout.interpreted)

        def gather_piece(run, following, state):
            step, tokens, words = state
            next_tokens = lines.tokens(following.row, following.rows)

            def store(step, words, k):
                stage = self.stage_of(step)

                @pl.when(step >= self.schedule.stages)
                def _wait():
                    plgpu.barrier_wait(self.empty.at[stage])

                lines.store(words, self.x_load.at[stage], run.row, run.rows, k * gather.LINE)
                plgpu.barrier_arrive(self.full.at[stage])

            def two_steps(i, state):
                """Loads are on their way while what came before is stored."""
                step, words = state
                k = gather.TOGETHER * i
                second = lines.load(tokens, run.rows, (k + 1) * gather.LINE)
                store(step, words, k)
                ended = k + 2 == span.k_steps
                of_next = lines.either(ended, next_tokens, tokens)
                rows = jnp.where(ended, following.rows, run.rows)
                column = jnp.where(ended, 0, (k + 2) * gather.LINE)
                words = lines.load(of_next, rows, column)
                store(step + 1, second, k + 1)
                return step + 2, words

            step, words = lax.fori_loop(
                0, span.k_steps // gather.TOGETHER, two_steps, (step, words)
            )
            return step, next_tokens, words

        def begin(run):
            tokens = lines.tokens(run.row, run.rows)
            return jnp.int32(0), tokens, lines.load(tokens, run.rows, jnp.int32(0))

        for_pieces(*pieces, begin, gather_piece)
