"""Rows of `gpu_outer` and `gpu_shrink_outer`: in steps, loaded, zeros where they are others'."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.hopper.zeros import WARPS, keep_rows

ROWS = 64  # of a step
LOADED = 24, 40, ROWS  # rows of a copy: those of a bucket are few where slots are many


def over_run(begin, end, visit, state):
    """state = visit(row, kept, state) for each step over a run; kept: its rows from that row on."""

    def rows(k, state):
        return visit(begin + k * ROWS, end - begin - k * ROWS, state)

    return lax.fori_loop(0, whole_units(end - begin, ROWS), rows, state)


def whole_units(count, unit):
    return lax.div(count + (unit - 1), jnp.int32(unit))


def load_rows(left, rank, right, column, row, kept, left_stage, right_stage, full) -> None:
    """Loads the rows from `row` on: the first `kept`, and maybe others'.

    Args:
      left, right: [M, columns]. rank, column: the first of each.
      left_stage: [ROWS, 64]. right_stage: [blocks, ROWS, 64]. full: a barrier of 1 + blocks
        arrivals.
    """
    blocks = right_stage.shape[0]

    def load(count: int, _):
        rows, loaded = pl.ds(row, count), pl.ds(0, count)

        def load_block(block):
            features = right.at[rows, pl.ds(column + 64 * block, 64)]
            plgpu.copy_gmem_to_smem(features, right_stage.at[block, loaded], full)

        # One warp issues copies too slowly.
        @plgpu.warp_map
        def _load(warp):
            @pl.when(warp == WARPS - 1)
            def _ranks():
                ranks = left.at[rows, pl.ds(rank, 64)]
                plgpu.copy_gmem_to_smem(ranks, left_stage.at[loaded], full)

            for first in range(0, blocks, WARPS):
                mine = functools.partial(load_block, first + warp)
                pl.when(warp < blocks - first)(mine) if blocks - first < WARPS else mine()

    for_height(LOADED, kept, load, None)


def clear_others(
    warpgroup, kept, left_stage, right_stage, first, blocks: int, clean, *, interpreted: bool
) -> None:
    """Makes zeros of all rows but the first `kept`.

    Args:
      warpgroup: who is to make them of blocks `first` to `first + blocks` of right; number 0 does
        of left too, and number 1 waits for that. clean: the stage's barrier of that.
    """
    keep = functools.partial(keep_rows, kept, interpreted=interpreted)
    pl.when(warpgroup == 0)(lambda: keep(left_stage))
    for block in range(blocks):
        keep(right_stage.at[first + block])
    plgpu.commit_smem()
    pl.when(warpgroup == 0)(lambda: plgpu.barrier_arrive(clean))
    pl.when(warpgroup != 0)(lambda: plgpu.barrier_wait(clean))
