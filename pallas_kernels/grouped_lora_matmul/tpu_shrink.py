"""The TPU kernel of the low-rank inputs: u = scaling · x·Aᵀ of each row's slot and group.

    grid: tiles of rows
    for each run of one slot and group: its A arrives from HBM, several runs ahead;
        for the terms of the slot's rank class:
            u[window] = select(rows of the run, scaling · Σ x[window]·Aᵀ in fixed steps, u)

x is read once for all terms. Rows without an adapter, and a term's rows of other rank classes, are
not written: they hold anything.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_lora_matmul.tpu_common import (
    HBM,
    Runs,
    blocks,
    dot,
    factor_of,
    nbytes,
    part_of,
    rows_within,
    stacks_of,
    windows,
    with_class,
)
from pallas_kernels.grouped_lora_matmul.tpu_schedule import K_STEP, Device, ShrinkSchedule
from pallas_kernels.grouped_lora_matmul.tpu_tasks import GROUP


def shrink_kernel(
    runs,
    scalings,
    sources,
    factors,
    firsts: tuple[int, ...],
    of_term,
    columns,
    schedule: ShrinkSchedule,
    device: Device,
):
    """Runs the kernel.

    Args:
      runs: int32 [tiles, 3, block_m]. scalings: float32 [S, G or 1] for each term.
      sources: one or more [M, width]. factors: one [S, G or 1, R, width] for each term, which may
        be `Layered`.
      firsts: the number of the first slot of each; 0 where there is one rank class.
      of_term, columns: each term's source and its first column there, a multiple of 128.

    Returns:
      One [M, R] for each term, in the sources' dtype.
    """
    s, rows, dtype = schedule, sources[0].shape[0], sources[0].dtype
    ranks = [factor.shape[2] for factor in factors]
    groups = [scaling.shape[1] for scaling in scalings]

    def rows_of(width):
        return pl.BlockSpec((s.block_m, width), lambda i: (i, 0))

    layer, stacks = stacks_of(*factors)
    scratch = []
    for factor in factors:
        scratch.append(pltpu.VMEM((s.run_buffers, *factor.shape[2:]), factor.dtype))
        scratch.append(pltpu.SemaphoreType.DMA((s.run_buffers,)))
    width = max(factor.shape[2] for factor in factors)
    scratch.append(pltpu.VMEM((s.heights[-1], width), jnp.float32))
    found = pl.pallas_call(
        functools.partial(_kernel, s, len(sources), firsts, of_term, columns, groups),
        out_shape=[jax.ShapeDtypeStruct((rows, rank), dtype) for rank in ranks],
        grid_spec=pl.GridSpec(
            grid=(runs.shape[0],),
            in_specs=[
                pl.BlockSpec((None, *runs.shape[1:]), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
                *[pl.BlockSpec(memory_space=pltpu.SMEM)] * (1 + len(scalings)),
                *(rows_of(source.shape[1]) for source in sources),
                *[pl.BlockSpec(memory_space=HBM)] * len(factors),
            ],
            out_specs=[rows_of(rank) for rank in ranks],
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=device.limit,
            shape_invariant_numerics=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=sum(2 * rows * rank * f.shape[3] for rank, f in zip(ranks, factors, strict=True)),
            bytes_accessed=nbytes(sources, factors) + 2 * rows * sum(ranks),
            transcendentals=0,
        ),
        name=f"lora_shrink_k{factors[0].shape[3]}_r{max(ranks)}_m{s.block_m}",
    )(runs, layer, *(scaling.reshape(-1) for scaling in scalings), *sources, *stacks)
    return tuple(found)


def _kernel(s: ShrinkSchedule, source_count, firsts, of_term, columns, groups, *refs):
    table, layer, *refs = refs
    terms = len(of_term)
    scalings, refs = refs[:terms], refs[terms:]
    sources, refs = refs[:source_count], refs[source_count:]
    factors = [part_of(factor, layer) for factor in refs[:terms]]
    found, refs = refs[terms : 2 * terms], refs[2 * terms :]
    ring, arrived, acc = refs[:-1:2], refs[1:-1:2], refs[-1]

    def copy(slot, group, buffer, act):
        def of_class(its_terms, slot):
            for i in its_terms:
                source = factor_of(factors[i], slot, group)
                act(pltpu.make_async_copy(source, ring[i].at[buffer], arrived[i].at[buffer]))

        with_class(slot, firsts, factors, of_class)

    def multiply(slot, lo, hi, buffer):
        def of_class(its_terms, slot):
            for i in its_terms:
                group = table[GROUP, lo] if groups[i] > 1 else 0
                _multiply(i, lo, hi, buffer, scalings[i][slot * groups[i] + group])

        with_class(slot, firsts, factors, of_class)

    def _multiply(i, lo, hi, buffer, scale):
        x, rank, width = sources[of_term[i]], factors[i].shape[2], factors[i].shape[3]

        def window(first, height):
            rows, total = pl.ds(first, height), acc.at[pl.ds(0, height), pl.ds(0, rank)]
            total[...] = jnp.zeros((height, rank), jnp.float32)

            def step(start, size):
                left = x[rows, pl.ds(columns[i] + start, size)]
                total[...] += dot(left, ring[i][buffer, :, pl.ds(start, size)], 1, 1)

            blocks(width, K_STEP, step)
            keep = rows_within(first, (height, rank), lo, hi)
            value = (total[...] * scale).astype(found[i].dtype)
            found[i][rows, :] = jnp.where(keep, value, found[i][rows, :])

        windows(lo, hi, s.block_m, s.heights, window)

    runs = Runs(table, jnp.int32(0), jnp.int32(s.block_m), copy, s.run_buffers)
    runs.each(runs.fetch(), multiply)
