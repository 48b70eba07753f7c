"""The Hopper kernel of the queries' gradient, and of each row's log-sum-exp.

A unit is a tile of 128 tokens of one head, 64 for each consumer; blocks of 64 keys and values come
in order through a ring. Scores are seen once: as in the forward pass, sums are of
exp2(S - maximum so far), corrected where the maximum grows, and divided by the total at the end:

    S = Q · Kᵀ,  dP = dO · Vᵀ - delta
    P = exp2(S - maximum)
    dQ = dQ · correction + (P · dP) · K

S and dP are made a block ahead, while the last ones' P is: the tensor cores need not wait for it.

A sink is a score that counts in a row's total and has no key: the sums begin with it.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.accumulate import continued, finished, start
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.paged_attention.gpu_gradient_loads import run_units, warpgroups
from pallas_kernels.paged_attention.gpu_gradient_units import (
    CONSUMERS,
    ROWS,
    TILED,
    GradientSizes,
    TileTable,
    Unit,
    Units,
    left_side,
    positions,
    visible,
)

OF_ROW = plgpu.Layout.WGMMA.reduce(1)


def query_gradients(sizes: GradientSizes, table: TileTable, q, k, v, dout, minus_delta, *sinks):
    """dq [places, H, D] in q's dtype, and each row's -log-sum-exp of Q · K, float32 [H, places].

    Args:
      q, dout: [places, H, D], [places, H, V]. k, v: [places, G, D], [places, G, V].
      minus_delta: float32 [H, places].
      sinks: float32 [H], scaled for powers of two, where the sizes say so.
    """
    s = sizes
    programs = s.programs(s.heads)
    stages = s.query_stages
    numbers = plgpu.SMEM((CONSUMERS, ROWS), jnp.float32)
    scratch = dict(
        # The result takes the place of the queries.
        q_tile=plgpu.SMEM((CONSUMERS, ROWS, s.width), q.dtype, transforms=TILED),
        dout_tile=plgpu.SMEM((CONSUMERS, ROWS, s.v_width), q.dtype, transforms=TILED),
        minus_delta_tile=numbers,
        minus_lse_tile=numbers,
        k_stages=plgpu.SMEM((stages, ROWS, s.width), q.dtype, transforms=TILED),
        v_stages=plgpu.SMEM((stages, ROWS, s.v_width), q.dtype, transforms=TILED),
        rows_full=plgpu.Barrier(num_arrivals=3, num_barriers=CONSUMERS),
        k_full=plgpu.Barrier(num_barriers=stages),
        v_full=plgpu.Barrier(num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    )
    if s.interpreted:
        scratch["left"] = plgpu.SMEM((CONSUMERS, ROWS, ROWS), q.dtype)
    kernel = kept_kernel(
        functools.partial(_body, s, programs, stages),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(minus_delta.shape, jnp.float32),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups(),
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=s.name("q"),
    )
    return kernel(*table, q, k, v, dout, minus_delta, *sinks)


def _body(sizes, programs, stages, count, words, *refs, **scratch):
    units = Units(count, words, sizes.heads, programs)
    *operands, dq, minus_lse = refs
    sinks = operands.pop() if sizes.sinks else None
    kernel = _Kernel(sizes, stages, *operands, sinks, dq, minus_lse, **scratch)

    run_units(units, kernel, stages)


class _Kernel:
    """What a program does, over the kernel's references."""

    def __init__(
        self,
        sizes,
        stages,
        q,
        k,
        v,
        dout,
        minus_delta,
        sinks,
        dq,
        minus_lse,
        q_tile,
        dout_tile,
        minus_delta_tile,
        minus_lse_tile,
        k_stages,
        v_stages,
        rows_full,
        k_full,
        v_full,
        empty,
        left=None,
    ):
        self.sizes, self.stages = sizes, stages
        self.to_base_2 = sizes.scale * math.log2(math.e)
        self.q, self.k, self.v, self.dout, self.minus_delta = q, k, v, dout, minus_delta
        self.sinks, self.dq, self.minus_lse = sinks, dq, minus_lse
        self.q_tile, self.dout_tile = q_tile, dout_tile
        self.minus_delta_tile, self.minus_lse_tile = minus_delta_tile, minus_lse_tile
        self.k_stages, self.v_stages, self.left = k_stages, v_stages, left
        self.rows_full, self.k_full, self.v_full, self.empty = rows_full, k_full, v_full, empty

    def blocks(self, unit: Unit):
        """First and last (exclusive) block of keys that the tile sees."""
        first, window = jnp.int32(0), self.sizes.window
        if window is not None:
            seen = jnp.maximum(unit.number * CONSUMERS * ROWS - window + 1, 0)
            first = lax.div(seen, jnp.int32(ROWS))
        return first, jnp.minimum((unit.number + 1) * CONSUMERS, unit.blocks)

    def steps_of(self, unit: Unit):
        first, stop = self.blocks(unit)
        return stop - first

    def load(self, unit: Unit, i, stage):
        """A unit's i-th block of keys and values."""
        head = lax.div(unit.part, jnp.int32(self.sizes.group))
        block = self.blocks(unit)[0] + i
        start = unit.place - unit.number * (CONSUMERS * ROWS)
        rows = pl.ds(pl.multiple_of(start + block * ROWS, ROWS), ROWS)
        plgpu.copy_gmem_to_smem(
            self.k.at[rows, head], self.k_stages.at[stage], self.k_full.at[stage]
        )
        plgpu.copy_gmem_to_smem(
            self.v.at[rows, head], self.v_stages.at[stage], self.v_full.at[stage]
        )

    def compute_unit(self, unit: Unit, step, ahead, warpgroup, loads):
        """Computes a unit; returns the step after it, and where `loads` are then."""
        s = self.sizes
        rows = pl.ds(pl.multiple_of(unit.place + warpgroup * ROWS, ROWS), ROWS)
        self.load_rows(unit, rows, warpgroup)
        first, stop = self.blocks(unit)
        diagonal = unit.number * CONSUMERS + warpgroup
        own_stop = jnp.minimum(diagonal + 1, stop)
        minus_delta = plgpu.load(self.minus_delta_tile.at[warpgroup], layout=OF_ROW)
        minus_delta = lax.broadcast_in_dim(minus_delta, (ROWS, ROWS), [0])
        multiply = functools.partial(self.multiply, warpgroup, minus_delta)
        add = functools.partial(self.add, warpgroup, diagonal * ROWS)
        sink, weight = (-jnp.inf, 0.0) if self.sinks is None else (self.sinks[unit.part], 1.0)
        sums = (
            plgpu.layout_cast(jnp.full((ROWS,), sink, jnp.float32), OF_ROW),
            plgpu.layout_cast(jnp.full((ROWS,), weight, jnp.float32), OF_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, s.width), jnp.float32), plgpu.Layout.WGMMA),
        )

        def attend(block, state):
            sums, products, step, ahead = state

            def beside():
                its = loads.load(ahead, step)
                return add(block, s.window is not None, step, sums, products), its

            (sums, ahead), products = multiply(step + 1, beside)
            return sums, products, step + 1, ahead

        def skip(block, state):
            del block
            step, ahead = state
            ahead = loads.load(ahead, step)
            self.skip(step)
            return step + 1, ahead

        _, products = multiply(step, lambda: None)
        last, state = own_stop - 1, (sums, products, step, ahead)
        sums, products, step, ahead = lax.fori_loop(first, last, attend, state)
        ahead = loads.load(ahead, step)
        maximum, total, dq = add(last, True, step, sums, products)
        step, ahead = lax.fori_loop(own_stop, stop, skip, (step + 1, ahead))
        self.minus_lse_tile[warpgroup] = (maximum + jnp.log2(total)) * (-1 / self.to_base_2)
        dq = dq * lax.broadcast_in_dim(s.scale / total, dq.shape, [0])
        self.q_tile[warpgroup] = dq.astype(self.q_tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            self.q_tile.at[warpgroup], self.dq.at[rows, unit.part], commit_group=False
        )
        plgpu.copy_smem_to_gmem(
            self.minus_lse_tile.at[warpgroup],
            self.minus_lse.at[unit.part, rows],
            commit_group=False,
        )
        plgpu.commit_smem_to_gmem_group()
        return step, ahead

    def load_rows(self, unit: Unit, rows, warpgroup):
        """A consumer's own queries and what goes with them."""
        # The last unit's results are read from there.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        full = self.rows_full.at[warpgroup]
        for source, target in (
            (self.q.at[rows, unit.part], self.q_tile),
            (self.dout.at[rows, unit.part], self.dout_tile),
            (self.minus_delta.at[unit.part, rows], self.minus_delta_tile),
        ):
            plgpu.copy_gmem_to_smem(source, target.at[warpgroup], full)
        plgpu.barrier_wait(full)

    def multiply(self, warpgroup, minus_delta, step, beside):
        """beside(); and S and dP - delta of a step's block, which are made at the same time."""
        stage = lax.rem(step, jnp.int32(self.stages))
        interpreted = self.sizes.interpreted

        def run(scores, dweights):
            start(dweights, minus_delta, interpreted)
            plgpu.barrier_wait(self.k_full.at[stage])
            plgpu.wgmma(scores, self.q_tile.at[warpgroup], self.k_stages.at[stage].T)
            plgpu.barrier_wait(self.v_full.at[stage])
            plgpu.wgmma(dweights, self.dout_tile.at[warpgroup], self.v_stages.at[stage].T)
            result = beside()
            found = plgpu.wgmma_accumulator_load(scores, wait_n=0)
            return result, (found, finished(dweights, minus_delta, interpreted, pending=0))

        return pl.run_scoped(run, plgpu.ACC((ROWS, ROWS)), plgpu.ACC((ROWS, ROWS)))

    def add(self, warpgroup, query, block, masked, step, sums, products):
        """The sums with those of a block, whose stage is given back.

        Args:
          query: the position of the first row. masked: some rows may not see all of the block.
        """
        maximum, total, dq = sums
        scores, dweights = products
        stage = lax.rem(step, jnp.int32(self.stages))
        if masked:
            scores = self.masked(query, block * ROWS, scores)
        higher = jnp.maximum(maximum, scores.max(axis=1) * self.to_base_2)
        # Before a row's first visible block the maximum is -inf; keep the arithmetic finite.
        base = jnp.where(higher == -jnp.inf, jnp.zeros_like(higher), higher)
        correction = jnp.exp2(maximum - base)
        base = lax.broadcast_in_dim(base, scores.shape, [0])
        weights = jnp.exp2(scores * self.to_base_2 - base)
        total = total * correction + weights.sum(axis=1)
        dq = dq * lax.broadcast_in_dim(correction, dq.shape, [0])
        dscores = (weights * dweights).astype(self.k_stages.dtype)
        left = left_side(dscores, self.left, warpgroup)

        def multiply(accumulators):
            plgpu.wgmma(accumulators[0], left, self.k_stages.at[stage])
            plgpu.wgmma_wait(0)

        (dq,) = continued([dq], multiply, self.sizes.interpreted)
        plgpu.barrier_arrive(self.empty.at[stage])
        return higher, total, dq

    def masked(self, query, key, scores):
        """-inf where a row may not look."""
        keys = positions(key, 1, scores.shape)
        seen = visible(positions(query, 0, scores.shape), keys, self.sizes.window)
        return jnp.where(seen, scores, jnp.full_like(scores, -jnp.inf))

    def skip(self, step):
        """A block past all of a consumer's rows."""
        stage = lax.rem(step, jnp.int32(self.stages))
        plgpu.barrier_wait(self.k_full.at[stage])
        plgpu.barrier_wait(self.v_full.at[stage])
        plgpu.barrier_arrive(self.empty.at[stage])
