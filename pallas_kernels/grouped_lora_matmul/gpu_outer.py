"""The Hopper kernel of the adapters' gradients: the sum of left[t] ⊗ right[t] over a bucket's rows.

One unit of work is one bucket and a slice of features. Rows come 64 at a time from the first of
each of the bucket's runs; those of the last step that belong to others are zeroed in shared memory
by a select, so nothing of theirs is multiplied. The sum runs over the rows in order, in one
accumulator.

    D = leftᵀ · right : [64 ranks, 256 features], the columns of all terms of one u together

Columns of u that no term owns stay in rows of D that nobody stores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_rows import Runs
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import overlaid, two_views, views_of
from pallas_kernels.hopper.store import whole_lines

ROWS = 64  # rows of one step
FEATURES = 256  # features of one unit
STAGES = 4
LINE = 128  # bytes of features stored at once


def outer_kernel(
    left,
    columns: tuple[tuple[int, int], ...],
    right,
    start: int,
    width: int,
    runs: Runs,
    dtype,
    *,
    interpreted=False,
):
    """Sums of u[t] ⊗ right[t, start : start + width] over the rows of each bucket's runs.

    Args:
      left: [M, a multiple of 64], u of all terms. columns: first and rank of each; a first column
        is a multiple of 8, the copy engine's unit. right: [M, at least start + width].
      dtype: what float32 sums are rounded to.

    Returns:
      `dtype` [buckets, rank, width] of each term; zeros for buckets without rows.
    """
    buckets = runs.first.shape[0]
    base, end = min(first for first, _ in columns), max(sum(its) for its in columns)
    rank_blocks, slices = pl.cdiv(end - base, 64), pl.cdiv(width, FEATURES)
    features_of_line = LINE // jnp.dtype(dtype).itemsize
    stored_width = whole_lines(width, features_of_line)
    units = buckets * rank_blocks * slices
    programs = min(PROGRAMS, units)
    wide = plgpu.SwizzleTransform(128)
    left_shape, right_shape = (STAGES, ROWS, 64), (STAGES, FEATURES // 64, ROWS, 64)

    def body(
        left, right, firsts, stops, begins, ends, *out, left_stage, right_stage, stored, full, empty
    ):
        ((left_load, left_tiles),) = views_of(left_stage, 2, interpreted=interpreted)
        ((right_load, right_tiles),) = views_of(right_stage, 2, interpreted=interpreted)
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        mine = lax.div(units - program + (programs - 1), jnp.int32(programs))

        def unit_at(i):
            index = program + i * programs
            feature = lax.rem(index, jnp.int32(slices)) * FEATURES
            rest = lax.div(index, jnp.int32(slices))
            rank_block = lax.rem(rest, jnp.int32(rank_blocks))
            bucket = lax.div(rest, jnp.int32(rank_blocks))
            return bucket, rank_block, feature

        def over_rows(bucket, visit, step):
            """visit(row, kept, step) for each step over the bucket's rows; how many are its own."""

            def run(number, step):
                begin, end = begins[number], ends[number]
                steps = lax.div(end - begin + (ROWS - 1), jnp.int32(ROWS))

                def rows(k, step):
                    visit(begin + k * ROWS, end - begin - k * ROWS, step)
                    return step + 1

                return lax.fori_loop(0, steps, rows, step)

            return lax.fori_loop(firsts[bucket], stops[bucket], run, step)

        @pl.when(warpgroup == 1)
        def _memory():
            def unit(i, step):
                bucket, rank_block, feature = unit_at(i)

                def load(row, kept, step):
                    del kept
                    stage = lax.rem(step, jnp.int32(STAGES))

                    @pl.when(step >= STAGES)
                    def _wait():
                        plgpu.barrier_wait(empty.at[stage])

                    rows = pl.ds(row, ROWS)
                    ranks = pl.ds(base + rank_block * 64, 64)
                    barrier = full.at[stage]
                    plgpu.copy_gmem_to_smem(left.at[rows, ranks], left_load.at[stage], barrier)
                    for block in range(FEATURES // 64):
                        features = pl.ds(start + feature + 64 * block, 64)
                        destination = right_load.at[stage, block]
                        plgpu.copy_gmem_to_smem(right.at[rows, features], destination, barrier)

                return over_rows(bucket, load, step)

            lax.fori_loop(0, mine, unit, jnp.int32(0))

        @pl.when(warpgroup == 0)
        def _compute():
            def unit(i, step):
                bucket, rank_block, feature = unit_at(i)

                def sums(*accumulators):
                    def add(row, kept, step):
                        del row
                        stage = lax.rem(step, jnp.int32(STAGES))
                        plgpu.barrier_wait(full.at[stage])

                        @pl.when(kept < ROWS)
                        def _clear_others():
                            _keep_rows(left_tiles.at[stage], kept)
                            for block in range(FEATURES // 64):
                                _keep_rows(right_tiles.at[stage, block], kept)
                            plgpu.commit_smem()

                        for block, accumulator in enumerate(accumulators):
                            features = right_tiles.at[stage, block]
                            plgpu.wgmma(accumulator, left_tiles.at[stage].T, features)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[stage])

                    end = over_rows(bucket, add, step)
                    return tuple(accumulator[...] for accumulator in accumulators), end

                totals, step = pl.run_scoped(sums, *[plgpu.ACC((64, 64))] * (FEATURES // 64))
                for line in range(FEATURES // features_of_line):
                    block, first = divmod(line * features_of_line, 64)
                    buffer = stored.at[line % 2]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    part = totals[block][:, first : first + features_of_line]
                    buffer[...] = part.astype(dtype)
                    plgpu.commit_smem()
                    features = pl.ds(feature + line * features_of_line, features_of_line)
                    store(buffer, bucket, rank_block, features)
                return step

            def store(buffer, bucket, rank_block, features):
                """Stores each term's own rows of a block of ranks."""
                for block in range(rank_blocks):

                    @pl.when(rank_block == block)
                    def _store(begin=base + 64 * block):
                        for (first, rank), sums in zip(columns, out, strict=True):
                            low, high = max(first, begin), min(first + rank, begin + 64)
                            if low < high:
                                plgpu.copy_smem_to_gmem(
                                    buffer.at[pl.ds(low - begin, high - low)],
                                    sums.at[bucket, pl.ds(low - first, high - low), features],
                                    commit_group=False,
                                )

                plgpu.commit_smem_to_gmem_group()

            lax.fori_loop(0, mine, unit, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct((buckets, rank, stored_width), dtype) for _, rank in columns
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=dict(
            left_stage=overlaid(two_views(left_shape, right.dtype), interpreted=interpreted),
            right_stage=overlaid(two_views(right_shape, right.dtype), interpreted=interpreted),
            stored=plgpu.SMEM(
                (2, 64, features_of_line),
                dtype,
                transforms=(plgpu.TilingTransform((1, features_of_line)), wide),
            ),
            full=plgpu.Barrier(num_arrivals=1 + FEATURES // 64, num_barriers=STAGES),
            empty=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"lora_outer_r{max(rank for _, rank in columns)}_n{width}_x{len(columns)}",
    )
    return tuple(sums[:, :, :width] for sums in kernel(left, right, *runs))


def _keep_rows(tile, count):
    """Zeroes the rows of a [rows, 64] tile from `count` on."""
    values = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
    row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
    tile[...] = jnp.where(row < count, values, jnp.zeros_like(values))
