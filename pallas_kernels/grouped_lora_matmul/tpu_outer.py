"""The TPU kernel of the weight gradients: the sum of left[t] ⊗ right[t] over each bucket's rows.

    grid: column tile, task (the rows of one group in one tile of rows)
    the sums of all slots of the group stay in VMEM while its tasks last;
    for each run of one slot: sums[slot] += select(rows of the run, left)ᵀ · select(…, right)

Both sides are selected: a NaN in a row of another slot must not meet a zero. Rows are added in
their order, so two runs give the same bits. Every group has a task, if only to write zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_lora_matmul.tpu_common import (
    Runs,
    blocks,
    dot,
    nbytes,
    rows_within,
    windows,
)
from pallas_kernels.grouped_lora_matmul.tpu_schedule import Device, OuterSchedule
from pallas_kernels.grouped_lora_matmul.tpu_tasks import Tasks

COLUMNS = 512


def outer_kernel(
    tasks: Tasks,
    runs,
    left,
    right,
    columns: tuple[int, int],
    shape: tuple[int, int],
    schedule: OuterSchedule,
    device: Device,
):
    """Runs the kernel; float32 shape + [R, width].

    Args:
      columns: first column of `right`, a multiple of the schedule's block_n, and width.
      tasks, runs: for the schedule's block_m. Tasks have as many groups as `shape`, all of them.
    """
    s, (slots, groups) = schedule, shape
    (rows, rank), (start, width) = left.shape, columns
    first = start // s.block_n

    def right_block(j, t, counts, tile, *_):
        return tile[t], first + j

    def sums(j, t, counts, tile, group, *_):
        return 0, jnp.minimum(group[t], groups - 1), 0, j

    return pl.pallas_call(
        functools.partial(_kernel, s, groups),
        out_shape=jax.ShapeDtypeStruct((slots, groups, rank, width), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tasks),
            grid=(pl.cdiv(width, s.block_n), tasks.counts[0]),
            in_specs=[
                pl.BlockSpec(
                    (None, *runs.shape[1:]),
                    lambda j, t, counts, tile, *_: (tile[t], 0, 0),
                    memory_space=pltpu.SMEM,
                ),
                pl.BlockSpec((s.block_m, rank), lambda j, t, counts, tile, *_: (tile[t], 0)),
                pl.BlockSpec((s.block_m, s.block_n), right_block),
            ],
            out_specs=pl.BlockSpec((slots, None, rank, s.block_n), sums),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=device.limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * rank * width,
            bytes_accessed=nbytes(left)
            + rows * width * right.dtype.itemsize
            + 4 * slots * groups * rank * width,
            transcendentals=0,
        ),
        name=f"lora_outer_r{rank}_n{width}_m{s.block_m}",
    )(*tasks, runs, left, right)


def _kernel(s: OuterSchedule, groups: int, *refs):
    tasks, (table, left, right, sums) = Tasks(*refs[:-4]), refs[-4:]
    t = pl.program_id(1)
    in_group = tasks.group[t] < groups

    @pl.when(in_group & (tasks.edges[t] % 2 == 1))
    def _():
        def clear(start, size):
            shape = (*sums.shape[:2], size)
            sums[:, :, pl.ds(start, size)] = jnp.zeros(shape, jnp.float32)

        blocks(s.block_n, COLUMNS, clear)

    def add(slot, lo, hi, _):
        def window(first, height):
            rows = pl.ds(first, height)
            keep = rows_within(first, (height, left.shape[1]), lo, hi)
            a = jnp.where(keep, left[rows, :], 0)

            def column(c, width):
                keep = rows_within(first, (height, width), lo, hi)
                b = jnp.where(keep, right[rows, pl.ds(c, width)], 0)
                sums[slot, :, pl.ds(c, width)] += dot(a, b, 0, 0)

            blocks(s.block_n, COLUMNS, column)

        windows(lo, hi, s.block_m, s.heights, window)

    @pl.when(in_group)
    def _():
        runs = Runs(table, tasks.lo[t], tasks.hi[t], lambda *_: None, 1)
        runs.each(runs.fetch(), add)
