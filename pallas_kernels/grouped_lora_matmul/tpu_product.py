"""The TPU kernel behind every product: y = x·W of each row's group, plus its low-rank terms.

    grid: core, column tile, task (the rows of one group in one tile of rows)
    1. start the copies of the low-rank factors of the task's first runs
    2. for each piece of the group's W:  acc[window] += x[window] · W, in fixed steps along K
    3. for each run of one slot:         acc[window] = select(rows of the run, acc + u·B, acc)
       with the terms of the slot's rank class: no others' factors are read
    4. y[window] = select(rows of the task, acc + bias, y)

W stays in VMEM while a group's tasks last, and pieces of the next groups arrive in the slots that
are free, so W is read once for each column tile and the copy engine is never idle. x and y move
once for each column tile, of which there is one wherever W fits.

Selects, not masks on operands, keep rows apart: 0 x NaN would not. Every sum over K is taken in
the same steps whatever the schedule, in one float32 accumulator, then each term is added: a row's
bits do not depend on its tile.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_lora_matmul.gate import Gate, gated
from pallas_kernels.grouped_lora_matmul.tpu_common import (
    HBM,
    Runs,
    blocks,
    dot,
    factor_of,
    loop,
    nbytes,
    part_of,
    rows_within,
    stacks_of,
    windows,
    with_class,
)
from pallas_kernels.grouped_lora_matmul.tpu_product_layout import COLUMNS, ProductLayout, Term
from pallas_kernels.grouped_lora_matmul.tpu_product_terms import add_run, copy_factor
from pallas_kernels.grouped_lora_matmul.tpu_product_weights import Weights
from pallas_kernels.grouped_lora_matmul.tpu_schedule import (
    K_STEP,
    LANES,
    PIECE,
    Device,
    ProductSchedule,
)
from pallas_kernels.grouped_lora_matmul.tpu_tasks import Tasks


def product_kernel(
    tasks: Tasks,
    runs,
    x,
    w,
    u,
    factors,
    terms: tuple[Term, ...],
    firsts: tuple[int, ...],
    contract: int,
    gate: Gate | None,
    schedule: ProductSchedule,
    device: Device,
    bias=None,
):
    """Runs the kernel.

    Args:
      tasks, runs: for the schedule's block_m; runs may be None without terms.
      x: [M, K]. w: [G, halves, N, K] (contract 2) or [G, K, N] (contract 1).
      u: one [M, R] for each term. factors: one [S, G or 1, R, width of the term] each. They and w
        may be `Layered`.
      firsts: the number of the first slot of each; 0 where there is one rank class.
      bias: [G, halves, N] or None; it may be `Layered` too. Its blocks are of the compiler's share
        of the VMEM: a few rows of as many columns as a column tile.

    Returns:
      [M, N] in x's dtype (N of one half when gated).
    """
    s = schedule
    rows, k = x.shape
    halves, n = (w.shape[1], w.shape[2]) if contract == 2 else (1, w.shape[2])
    layout = ProductLayout(s, contract, gate, terms, firsts, k, n, halves, bias is not None)
    tiles_of_core = s.n_tiles // s.cores

    def by_row(core, j, t, counts, tile, *_):
        return tile[t], 0

    def by_tile(core, j, t, counts, tile, *_):
        return tile[t], 0, 0

    def output(core, j, t, counts, tile, *_):
        return tile[t], core * tiles_of_core + j

    in_specs = [pl.BlockSpec((s.block_m, k), by_row), pl.BlockSpec(memory_space=HBM)]
    of_base = [w] if bias is None else [w, bias]
    layer, stacks = stacks_of(*of_base, *factors)
    base_stacks, factor_stacks = stacks[: len(of_base)], stacks[len(of_base) :]
    inputs = [x, *base_stacks]
    if bias is not None:

        def of_group(core, j, t, *scalars):
            *tasks, layer = scalars
            # Rows past the last group, which are given none, are of the number after it.
            group = jnp.minimum(Tasks(*tasks).group[t], w.shape[0] - 1)
            part = layer[0] if base_stacks[1].shape[0] > 1 else 0
            return part, group, 0, core * tiles_of_core + j

        in_specs.append(pl.BlockSpec((None, None, halves, s.block_n), of_group))
    if terms:
        in_specs.append(pl.BlockSpec((None, *runs.shape[1:]), by_tile, memory_space=pltpu.SMEM))
        in_specs += [pl.BlockSpec((s.block_m, v.shape[1]), by_row) for v in u]
        in_specs += [pl.BlockSpec(memory_space=HBM)] * len(factors)
        inputs += [runs, *u, *factor_stacks]
    scratch = [
        pltpu.VMEM((s.ring, *layout.piece_shape), w.dtype),
        pltpu.SemaphoreType.DMA((s.ring,)),
        pltpu.VMEM((halves, s.block_m, s.block_n), jnp.float32),
    ]
    for factor, term in zip(factors, terms, strict=True):
        width = min(term.width, s.block_n)
        scratch.append(pltpu.VMEM((s.run_buffers, factor.shape[2], width), factor.dtype))
        scratch.append(pltpu.SemaphoreType.DMA((s.run_buffers,)))
    flops = 2 * rows * n * halves * k
    flops += sum(2 * rows * v.shape[1] * t.width for v, t in zip(u, terms, strict=True))
    kind = "gated" if gate is not None else ("forward", "backward")[2 - contract]
    return pl.pallas_call(
        functools.partial(_kernel, layout),
        out_shape=jax.ShapeDtypeStruct((rows, n), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tasks) + 1,
            grid=(s.cores, tiles_of_core, tasks.counts[0]),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((s.block_m, s.block_n), output),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=device.limit,
            shape_invariant_numerics=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            bytes_accessed=nbytes(x, of_base, u, factors) + rows * n * x.dtype.itemsize,
            transcendentals=rows * n if gate is not None else 0,
        ),
        name=f"lora_{kind}_k{k}_n{n}_m{s.block_m}_t{s.n_tiles}",
    )(*tasks, layer, *inputs)


def _kernel(layout: ProductLayout, *refs):
    s, terms = layout.schedule, len(layout.terms)
    tasks, refs = Tasks(*refs[: len(Tasks._fields)]), refs[len(Tasks._fields) :]
    layer, x, w, *refs = refs
    w = part_of(w, layer)
    bias, *refs = refs if layout.biased else (None, *refs)
    table, u, factors = None, (), ()
    if terms:
        table, u, factors = refs[0], refs[1 : 1 + terms], refs[1 + terms : 1 + 2 * terms]
        factors = [part_of(factor, layer) for factor in factors]
        refs = refs[1 + 2 * terms :]
    y, w_ring, w_arrived, acc, *run_refs = refs
    run_ring, run_arrived = run_refs[::2], run_refs[1::2]
    core, j, t = (pl.program_id(axis) for axis in range(3))
    column_tile = core * (s.n_tiles // s.cores) + j
    lo, hi = tasks.lo[t], tasks.hi[t]
    weights = Weights(layout, tasks, w, w_ring, w_arrived, core)

    @pl.when((j == 0) & (t == 0))
    def _():
        weights.fetch_first()

    past_the_end = tasks.group[t] == w.shape[0]

    @pl.when(past_the_end)
    def _():
        _store(layout, y, None, None, lo, hi)

    @pl.when(jnp.logical_not(past_the_end))
    def _():
        def copy(slot, _, buffer, act):
            def of_class(its_terms, slot):
                for i in its_terms:
                    source = factor_of(factors[i], slot, tasks.group[t])
                    places = run_ring[i].at[buffer], run_arrived[i].at[buffer]
                    copy_factor(layout, layout.terms[i], column_tile, source, *places, act)

            with_class(slot, layout.firsts, factors, of_class)

        def add(slot, lo, hi, buffer):
            def of_class(its_terms, _):
                add_run(layout, its_terms, acc, u, run_ring, column_tile, lo, hi, buffer)

            with_class(slot, layout.firsts, factors, of_class)

        if terms:
            runs = Runs(table, lo, hi, copy, s.run_buffers)
            ahead = runs.fetch()
        multiply = _multiply_forward if layout.contract == 2 else _multiply_backward
        multiply(layout, x, acc, weights, j, t, lo, hi)
        if terms:
            runs.each(ahead, add)
        _store(layout, y, acc, bias, lo, hi)


def _multiply_forward(layout: ProductLayout, x, acc, weights: Weights, j, t, lo, hi):
    """acc = x·Wᵀ; each piece is some of the output columns."""
    s = layout.schedule
    # Gate and up in one dot, where the result can be cut between lane tiles.
    together = layout.halves if s.piece % LANES == 0 else 1

    def multiply(piece):
        slot = weights.wait(j, t, piece)
        columns = pl.ds(_aligned(piece * s.piece, s.piece, s.pieces), s.piece)

        def window(first, height):
            rows = pl.ds(first, height)
            for half in range(layout.halves):
                acc[half, rows, columns] = jnp.zeros((height, s.piece), jnp.float32)

            def step(start, size):
                left = x[rows, pl.ds(start, size)]
                for half in range(0, layout.halves, together):
                    w_rows = pl.ds(half * layout.half_stride, together * s.piece)
                    both = dot(left, weights.ring[slot, w_rows, pl.ds(start, size)], 1, 1)
                    for i in range(together):
                        part = both[:, i * s.piece : (i + 1) * s.piece]
                        acc[half + i, rows, columns] += part

            blocks(layout.k, K_STEP, step)

        windows(lo, hi, s.block_m, s.heights, window)
        weights.release(j, t, piece)

    loop(s.pieces, multiply)


def _multiply_backward(layout: ProductLayout, x, acc, weights: Weights, j, t, lo, hi):
    """acc = x·W; each piece is some of the terms of the sum over K."""
    s = layout.schedule

    def clear(first, height):
        acc[0, pl.ds(first, height), :] = jnp.zeros((height, s.block_n), jnp.float32)

    windows(lo, hi, s.block_m, s.heights, clear)

    def multiply(piece, size):
        slot = weights.wait(j, t, piece)
        start = _aligned(piece * s.piece, s.piece, s.pieces)

        def window(first, height):
            rows = pl.ds(first, height)

            def step(k, k_size):
                left = x[rows, pl.ds(start + k, k_size)]

                def column(c, width):
                    weight = weights.ring[slot, pl.ds(k, k_size), pl.ds(c, width)]
                    acc[0, rows, pl.ds(c, width)] += dot(left, weight, 1, 0)

                blocks(s.block_n, COLUMNS, column)

            blocks(size, PIECE, step)

        windows(lo, hi, s.block_m, s.heights, window)
        weights.release(j, t, piece)

    whole, rest = divmod(layout.k, s.piece)
    loop(whole, lambda piece: multiply(piece, s.piece))
    if rest:
        multiply(whole, rest)


def _aligned(start, unit: int, count: int):
    """A multiple of unit, said to the compiler where it is not static; 0 if there is one only."""
    if count == 1:
        return 0
    return start if isinstance(start, int) else pl.multiple_of(start, unit)


def _store(layout: ProductLayout, y, acc, bias, lo, hi):
    """The task's rows of y from the accumulators, plus a bias if there is one; zeros without."""
    s = layout.schedule

    def window(first, height):
        rows = pl.ds(first, height)

        def column(c, width):
            columns = pl.ds(c, width)
            biases = None if bias is None else bias[:, columns].astype(jnp.float32)

            def sums(half):
                total = acc[half, rows, columns]
                return total if biases is None else total + biases[half : half + 1]

            if acc is None:
                value = jnp.zeros((height, width), jnp.float32)
            elif layout.gate is not None:
                # Of what the product without a gate would give: training gates that.
                halves = (sums(half).astype(y.dtype) for half in range(2))
                value = gated(*(half.astype(jnp.float32) for half in halves), layout.gate)
            else:
                value = sums(0)
            keep = rows_within(first, (height, width), lo, hi)
            y[rows, columns] = jnp.where(keep, value.astype(y.dtype), y[rows, columns])

        blocks(s.block_n, COLUMNS, column)

    windows(lo, hi, s.block_m, s.heights, window)
