"""Copies rows to where their experts read them: y[i] = x[index[i]], by the copy engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_schedule import PROGRAMS, SHARED_MEMORY

LINE = 128  # elements: a copy's box may not be wider than 256
ROWS = 8  # rows of one stage


def gather_rows(x, index):
    """Rows of x in another order.

    Args:
      x: [T, K], K a multiple of 128 and at most 32768. index: int32 [M], M a multiple of 8.

    Returns:
      [M, K].
    """
    lines, rows = x.shape[1] // LINE, index.shape[0]
    stages = min(8, SHARED_MEMORY // (ROWS * x.shape[1] * x.dtype.itemsize))
    units = rows // ROWS
    programs = min(PROGRAMS, units)

    def body(x, index, y, stage_of_rows, full):
        program = lax.axis_index("program")
        mine = lax.div(units - program + (programs - 1), jnp.int32(programs))

        def load(i):
            stage = lax.rem(i, jnp.int32(stages))
            first = (program + i * programs) * ROWS
            tokens = [index[first + j] for j in range(ROWS)]
            for j, token in enumerate(tokens):
                plgpu.copy_gmem_to_smem(x.at[token], stage_of_rows.at[stage, j], full.at[stage])

        def unit(i, carry):
            stage = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(full.at[stage])
            rows = pl.ds((program + i * programs) * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(stage_of_rows.at[stage], y.at[rows])

            @pl.when(i + (stages - 1) < mine)
            def _next():
                # The stage before this one is stored: all but the newest store have read.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                load(i + (stages - 1))

            return carry

        lax.fori_loop(0, jnp.minimum(mine, stages - 1), lambda i, c: (load(i), c)[1], 0)
        lax.fori_loop(0, mine, unit, 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, lines, LINE), x.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=dict(
            stage_of_rows=plgpu.SMEM((stages, ROWS, lines, LINE), x.dtype),
            full=plgpu.Barrier(num_arrivals=ROWS, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"lora_gather_k{x.shape[1]}",
    )
    return kernel(x.reshape(-1, lines, LINE), index).reshape(rows, -1)
