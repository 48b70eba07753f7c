"""The Hopper kernel of the keys' and values' gradients.

A unit is a tile of 128 keys of one head, 64 for each consumer, and some of the query heads that
read it; blocks of 64 queries come in order through a ring, from the tile's own on, head after head:

    Sᵀ = K · Qᵀ - log-sum-exp,  dPᵀ = V · dOᵀ - delta
    Pᵀ = exp(Sᵀ · scale)
    dV += Pᵀ · dO
    dK += (Pᵀ · dPᵀ) · Q

What is taken away is what the accumulators of Sᵀ and dPᵀ start with: no registers hold it. The sums
have 128 of a thread's, so that nothing else fits beside these two. Where they have more, as of
latents' heads, Sᵀ and dPᵀ follow each other.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.accumulate import finished, start
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.paged_attention.gpu_gradient_loads import run_units, warpgroups
from pallas_kernels.paged_attention.gpu_gradient_units import (
    COLUMNS,
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


def key_gradients(sizes: GradientSizes, table: TileTable, q, k, v, dout, minus_lse, minus_delta):
    """dk, dv in parts that are to be summed: float32 [parts, places, G, D], [parts, places, G, V].

    Args:
      q, dout: [places, H, D], [places, H, V]. k, v: [places, G, D], [places, G, V].
      minus_lse, minus_delta: float32 [H, places], the former of Q · K without the scale.
    """
    s = sizes
    units_of_tile = s.kv_heads * s.parts
    programs = s.programs(units_of_tile)
    stages = s.key_stages
    numbers = plgpu.SMEM((stages, ROWS), jnp.float32)
    scratch = dict(
        k_tile=plgpu.SMEM((CONSUMERS, ROWS, s.width), q.dtype, transforms=TILED),
        v_tile=plgpu.SMEM((CONSUMERS, ROWS, s.v_width), q.dtype, transforms=TILED),
        q_stages=plgpu.SMEM((stages, ROWS, s.width), q.dtype, transforms=TILED),
        dout_stages=plgpu.SMEM((stages, ROWS, s.v_width), q.dtype, transforms=TILED),
        minus_lse_stages=numbers,
        minus_delta_stages=numbers,
        stored=plgpu.SMEM(
            (CONSUMERS, ROWS, COLUMNS),
            jnp.float32,
            transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
        ),
        rows_full=plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS),
        full=plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    )
    if s.interpreted:
        scratch["left"] = plgpu.SMEM((CONSUMERS, 2, ROWS, ROWS), q.dtype)
    kernel = kept_kernel(
        functools.partial(_body, s, programs, stages),
        out_type=tuple(
            jax.ShapeDtypeStruct((s.parts, *like.shape), jnp.float32) for like in (k, v)
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
        kernel_name=s.name("kv"),
    )
    return kernel(*table, q, k, v, dout, minus_lse, minus_delta)


def _body(sizes, programs, stages, count, words, *refs, **scratch):
    units = Units(count, words, sizes.kv_heads * sizes.parts, programs)
    kernel = _Kernel(sizes, stages, *refs, **scratch)

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
        minus_lse,
        minus_delta,
        dk,
        dv,
        k_tile,
        v_tile,
        q_stages,
        dout_stages,
        minus_lse_stages,
        minus_delta_stages,
        stored,
        rows_full,
        full,
        empty,
        left=None,
    ):
        self.sizes, self.stages = sizes, stages
        self.q, self.k, self.v, self.dout = q, k, v, dout
        self.minus_lse, self.minus_delta = minus_lse, minus_delta
        self.dk, self.dv = dk, dv
        self.k_tile, self.v_tile, self.stored, self.left = k_tile, v_tile, stored, left
        self.q_stages, self.dout_stages = q_stages, dout_stages
        self.minus_lse_stages, self.minus_delta_stages = minus_lse_stages, minus_delta_stages
        self.rows_full, self.full, self.empty = rows_full, full, empty

    def blocks(self, unit: Unit):
        """First block of queries that see the tile, and how many there are."""
        first, stop, window = unit.number * CONSUMERS, unit.blocks, self.sizes.window
        if window is not None:
            last = (unit.number + 1) * (CONSUMERS * ROWS) - 1 + window - 1
            stop = jnp.minimum(stop, lax.div(last, jnp.int32(ROWS)) + 1)
        return first, stop - first

    def kv_head(self, unit: Unit):
        return lax.div(unit.part, jnp.int32(self.sizes.parts))

    def steps_of(self, unit: Unit):
        return self.blocks(unit)[1] * self.sizes.heads_of_unit

    def load(self, unit: Unit, i, stage):
        """A unit's i-th block of queries, and what goes with them."""
        first, count = self.blocks(unit)
        head = unit.part * self.sizes.heads_of_unit + lax.div(i, count)
        block = first + lax.rem(i, count)
        start = unit.place - unit.number * (CONSUMERS * ROWS)
        rows = pl.ds(pl.multiple_of(start + block * ROWS, ROWS), ROWS)
        for source, target in (
            (self.minus_lse.at[head, rows], self.minus_lse_stages),
            (self.minus_delta.at[head, rows], self.minus_delta_stages),
            (self.q.at[rows, head], self.q_stages),
            (self.dout.at[rows, head], self.dout_stages),
        ):
            plgpu.copy_gmem_to_smem(source, target.at[stage], self.full.at[stage])

    def compute_unit(self, unit: Unit, step, ahead, warpgroup, loads):
        """Computes a unit; returns the step after it, and where `loads` are then."""
        s = self.sizes
        head = self.kv_head(unit)
        rows = pl.ds(pl.multiple_of(unit.place + warpgroup * ROWS, ROWS), ROWS)
        full = self.rows_full.at[warpgroup]
        plgpu.copy_gmem_to_smem(self.k.at[rows, head], self.k_tile.at[warpgroup], full)
        plgpu.copy_gmem_to_smem(self.v.at[rows, head], self.v_tile.at[warpgroup], full)
        plgpu.barrier_wait(full)
        first, count = self.blocks(unit)
        key = (unit.number * CONSUMERS + warpgroup) * ROWS

        def sums(dk, dv):
            def add(i, state):
                step, ahead = state
                query = (first + lax.rem(i, count)) * ROWS
                beside = functools.partial(loads.load, ahead, step)
                return step + 1, self.add(dk, dv, warpgroup, query, key, step, beside)

            end = lax.fori_loop(0, count * s.heads_of_unit, add, (step, ahead))
            return dk[...], dv[...], end

        accumulators = plgpu.ACC((ROWS, s.width)), plgpu.ACC((ROWS, s.v_width))
        dk, dv, end = pl.run_scoped(sums, *accumulators)
        part = lax.rem(unit.part, jnp.int32(s.parts))
        self.store(dk * s.scale, self.dk, part, rows, head, warpgroup)
        self.store(dv, self.dv, part, rows, head, warpgroup)
        return end

    def add(self, dk, dv, warpgroup, query, key, step, beside):
        """Adds a step's block; beside() while its last products run."""
        stage = lax.rem(step, jnp.int32(self.stages))
        queries, dout = self.q_stages.at[stage], self.dout_stages.at[stage]
        to_base_2 = self.sizes.scale * math.log2(math.e)
        interpreted, together = self.sizes.interpreted, self.sizes.has_room

        def start_with(accumulator, stages):
            numbers = self.of_columns(stages.at[stage])
            start(accumulator, numbers, interpreted)
            return numbers

        def multiply_values(dweights):
            plgpu.wgmma(dweights, self.v_tile.at[warpgroup], dout.T)
            # All warps have read the numbers before a copy replaces them.
            plgpu.commit_smem()

        def multiply(scores, dweights):
            plgpu.barrier_wait(self.full.at[stage])
            minus_lse = start_with(scores, self.minus_lse_stages)
            if together:
                minus_delta = start_with(dweights, self.minus_delta_stages)
            plgpu.wgmma(scores, self.k_tile.at[warpgroup], queries.T)
            if together:
                multiply_values(dweights)
            found = finished(scores, minus_lse, interpreted, pending=int(together))
            weights = self.masked(query, key, jnp.exp2(found * to_base_2)).astype(queries.dtype)
            plgpu.wgmma(dv, left_side(weights, self.left, warpgroup, 0), dout)
            if not together:
                plgpu.wgmma_wait(0)
                minus_delta = start_with(dweights, self.minus_delta_stages)
                multiply_values(dweights)
            dfound = finished(dweights, minus_delta, interpreted, pending=int(together))
            # The rounded weights: there is no room for both.
            dscores = (weights.astype(jnp.float32) * dfound).astype(queries.dtype)
            plgpu.wgmma(dk, left_side(dscores, self.left, warpgroup, 1), queries)
            result = beside()
            plgpu.wgmma_wait(0)
            return result

        accumulators = plgpu.ACC((ROWS, ROWS)), plgpu.ACC((ROWS, ROWS))
        result = pl.run_scoped(multiply, *accumulators)
        plgpu.barrier_arrive(self.empty.at[stage])
        return result

    def of_columns(self, numbers):
        """One number for each query, in all rows."""
        numbers = plgpu.load(numbers, layout=plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(numbers, (ROWS, ROWS), [1])

    def masked(self, query, key, weights):
        """Zeros where a query may not look, of blocks where some queries may not."""
        window = self.sizes.window

        def mask(weights):
            keys = positions(key, 0, weights.shape)
            seen = visible(positions(query, 1, weights.shape), keys, window)
            return jnp.where(seen, weights, jnp.zeros_like(weights))

        partly = query < key + ROWS
        if window is not None:
            partly |= query + ROWS - 1 >= key + window
        return lax.cond(partly, mask, lambda weights: weights, weights)

    def store(self, sums, target, part, rows, head, warpgroup):
        buffer = self.stored.at[warpgroup]
        for column in range(0, sums.shape[1], COLUMNS):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = sums[:, column : column + COLUMNS]
            plgpu.commit_smem()
            columns = pl.ds(column, COLUMNS)
            plgpu.copy_smem_to_gmem(buffer, target.at[part, rows, head, columns])
