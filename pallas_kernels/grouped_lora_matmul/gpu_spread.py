"""Lays rows out in the order of the route: y[position[t, c]] = x[t], by the copy engine.

Each row of x is read once, and stored once for each of its token's choices.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.machine import PROGRAMS, SHARED_MEMORY

WIDEST = 128  # elements of a line of a row: a copy's box may not be wider than 256,
MOST_LINES = 256  # nor have more lines
MOST_STAGES = 8
MAX_WIDTH = 32768  # of a row: of wider ones there is no second stage
COPY_UNIT = 128  # bytes of shared memory that a copy begins at a multiple of


def spread_rows(x, position):
    """Rows of x where their choices are.

    Args:
      x: [T, K], K a multiple of 8 and at most MAX_WIDTH. position: int32 [T, choices], each row
        of the result once.

    Returns:
      [T * choices, K].
    """
    tokens, choices = position.shape
    rows, width = tokens * choices, x.shape[1]
    line = math.gcd(width, WIDEST)
    lines = width // line
    # Of shared memory: every stage, which a copy fills, begins at a multiple of its unit.
    lines_of_unit = max(1, COPY_UNIT // (line * x.dtype.itemsize))
    stage_lines = -(-lines // lines_of_unit) * lines_of_unit
    stages = min(MOST_STAGES, SHARED_MEMORY // (stage_lines * line * x.dtype.itemsize))
    programs = min(PROGRAMS, tokens)
    parts = [pl.ds(at, min(MOST_LINES, lines - at)) for at in range(0, lines, MOST_LINES)]

    def body(x, position, y, *, stage_of_row, full):
        program = lax.axis_index("program")
        wait_for_kernels_before(rows)
        mine = lax.div(tokens - program + (programs - 1), jnp.int32(programs))

        def load(i):
            stage = lax.rem(i, jnp.int32(stages))
            token = program + i * programs
            for part in parts:
                plgpu.copy_gmem_to_smem(
                    x.at[token, part], stage_of_row.at[stage, part], full.at[stage]
                )

        def unit(i, carry):
            stage, token = lax.rem(i, jnp.int32(stages)), program + i * programs
            places = [position[token * choices + choice] for choice in range(choices)]
            plgpu.barrier_wait(full.at[stage])
            for place in places:
                for part in parts:
                    plgpu.copy_smem_to_gmem(
                        stage_of_row.at[stage, part], y.at[place, part], commit_group=False
                    )
            plgpu.commit_smem_to_gmem_group()

            @pl.when(i + (stages - 1) < mine)
            def _next():
                # The stage before this one is stored: all but the newest store have read.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                load(i + (stages - 1))

            return carry

        lax.fori_loop(0, jnp.minimum(mine, stages - 1), lambda i, c: (load(i), c)[1], 0)
        lax.fori_loop(0, mine, unit, 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = kept_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, lines, line), x.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=dict(
            stage_of_row=plgpu.SMEM((stages, stage_lines, line), x.dtype),
            full=plgpu.Barrier(num_arrivals=len(parts), num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"lora_spread_k{width}",
    )
    return kernel(x.reshape(-1, lines, line), position.reshape(-1)).reshape(rows, width)
