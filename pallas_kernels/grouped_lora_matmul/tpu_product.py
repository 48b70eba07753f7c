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

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
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
from pallas_kernels.grouped_lora_matmul.tpu_schedule import (
    K_STEP,
    LANES,
    PIECE,
    ROW_ALIGN,
    Device,
    ProductSchedule,
    round_up,
)
from pallas_kernels.grouped_lora_matmul.tpu_tasks import Tasks

COLUMNS = 1024  # columns of one dot or one elementwise step


@dataclasses.dataclass(frozen=True)
class Term:
    """Where one low-rank term goes.

    Attributes:
      half: 0, or 1 for up.
      start, width: the columns that its factor covers, in its half.
      kept: the part of those columns that is added; None for all of them.
    """

    half: int
    start: int
    width: int
    kept: tuple[int, int] | None = None


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
    layout = _Layout(s, contract, gate, terms, firsts, k, n, halves, bias is not None)
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


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Static facts of one kernel."""

    schedule: ProductSchedule
    contract: int
    gate: Gate | None
    terms: tuple[Term, ...]
    firsts: tuple[int, ...]
    k: int
    n: int
    halves: int
    biased: bool

    @property
    def half_stride(self) -> int:
        """Rows from gate's part of a piece to up's."""
        return self.schedule.piece if self.halves == 1 else round_up(self.schedule.piece, ROW_ALIGN)

    @property
    def piece_shape(self):
        if self.contract == 2:
            return self.halves * self.half_stride, self.k
        return self.schedule.piece, self.schedule.block_n


def _kernel(layout: _Layout, *refs):
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
    weights = _Weights(layout, tasks, w, w_ring, w_arrived, core)

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
                    _copy_factor(layout, layout.terms[i], column_tile, source, *places, act)

            with_class(slot, layout.firsts, factors, of_class)

        def add(slot, lo, hi, buffer):
            def of_class(its_terms, _):
                _add_run(layout, its_terms, acc, u, run_ring, column_tile, lo, hi, buffer)

            with_class(slot, layout.firsts, factors, of_class)

        if terms:
            runs = Runs(table, lo, hi, copy, s.run_buffers)
            ahead = runs.fetch()
        multiply = _multiply_forward if layout.contract == 2 else _multiply_backward
        multiply(layout, x, acc, weights, j, t, lo, hi)
        if terms:
            runs.each(ahead, add)
        _store(layout, y, acc, bias, lo, hi)


class _Weights:
    """The ring of pieces of W. Pieces follow each other by column tile, group and part."""

    def __init__(self, layout: _Layout, tasks: Tasks, w, ring, arrived, core):
        self.layout, self.tasks, self.w = layout, tasks, w
        self.ring, self.arrived, self.core = ring, arrived, core
        self.groups = tasks.counts[1]
        self.tiles_of_core = layout.schedule.n_tiles // layout.schedule.cores

    def fetch_first(self):
        for piece in range(self.layout.schedule.ring):
            self._fetch(0, 0, piece, piece)

    def wait(self, j, t, piece):
        """Waits for a piece of the task's group, if its first task: afterwards it stays."""
        slot = self.slot(j, t, piece)

        @pl.when(self.tasks.edges[t] % 2 == 1)
        def _():
            self._copy(j, self.tasks.ordinal[t], piece, slot, lambda copy: copy.wait())

        return slot

    def release(self, j, t, piece):
        """After a piece's last use, its slot takes the piece that is `ring` further."""

        @pl.when(self.tasks.edges[t] >= 2)
        def _():
            ring = self.layout.schedule.ring
            self._fetch(j, self.tasks.ordinal[t], piece + ring, self.slot(j, t, piece))

    def slot(self, j, t, piece):
        s = self.layout.schedule
        sequence = (j * self.groups + self.tasks.ordinal[t]) * s.pieces + piece
        return lax.rem(sequence, s.ring)

    def _fetch(self, j, ordinal, piece, slot):
        """Starts a copy, if there is such a piece; `piece` counts from the ordinal's first."""
        s = self.layout.schedule
        ordinal = ordinal + piece // s.pieces
        piece = piece % s.pieces
        for _ in range(-(-s.ring // s.pieces)):  # with one group, each step is a column tile
            j, ordinal = (
                jnp.where(ordinal >= self.groups, j + 1, j),
                jnp.where(ordinal >= self.groups, ordinal - self.groups, ordinal),
            )

        @pl.when((j < self.tiles_of_core) & (self.groups > 0))
        def _():
            self._copy(j, ordinal, piece, slot, lambda copy: copy.start())

    def _copy(self, j, ordinal, piece, slot, act):
        """Acts on the copies of one piece, the last ones of an axis being smaller."""
        layout, s = self.layout, self.layout.schedule
        source, target, semaphore = (
            self.w.at[self.tasks.active[ordinal]],
            self.ring.at[slot],
            self.arrived.at[slot],
        )
        column_tile = self.core * self.tiles_of_core + j
        # Of one alone it is known: W may have fewer rows than a piece, and none is whole then.
        last_piece = s.pieces == 1 or piece == s.pieces - 1
        last_tile = s.n_tiles == 1 or column_tile == s.n_tiles - 1

        def forward(rows):
            start = column_tile * s.block_n + piece * s.piece
            for half in range(layout.halves):
                part, place = source.at[half], target
                if rows < layout.n:
                    part = part.at[pl.ds(start, rows)]
                if rows < target.shape[0]:
                    place = target.at[pl.ds(half * layout.half_stride, rows)]
                act(pltpu.make_async_copy(part, place, semaphore))

        def backward(rows, columns):
            part, place = source, target
            if (rows, columns) != (layout.k, layout.n):
                start = pl.multiple_of(column_tile * s.block_n, LANES) if s.n_tiles > 1 else 0
                part = source.at[pl.ds(piece * s.piece, rows), pl.ds(start, columns)]
            if (rows, columns) != target.shape:
                place = target.at[pl.ds(0, rows), pl.ds(0, columns)]
            act(pltpu.make_async_copy(part, place, semaphore))

        if layout.contract == 2:
            last = last_piece if s.n_tiles == 1 else last_tile & last_piece
            _last_or_whole(last, layout.n % s.piece or s.piece, s.piece, forward)
            return

        def with_rows(rows):
            rest = layout.n % s.block_n or s.block_n
            _last_or_whole(last_tile, rest, s.block_n, functools.partial(backward, rows))

        _last_or_whole(last_piece, layout.k % s.piece or s.piece, s.piece, with_rows)


def _last_or_whole(is_last, rest: int, whole: int, body):
    """body(rest) or body(whole), once if they are equal or is_last is static."""
    if rest == whole:
        body(whole)
    elif isinstance(is_last, bool):
        body(rest if is_last else whole)
    else:
        pl.when(is_last)(lambda: body(rest))
        pl.when(jnp.logical_not(is_last))(lambda: body(whole))


def _multiply_forward(layout: _Layout, x, acc, weights: _Weights, j, t, lo, hi):
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


def _multiply_backward(layout: _Layout, x, acc, weights: _Weights, j, t, lo, hi):
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


def _needed(s: ProductSchedule, term: Term, column_tile):
    """Whether a column tile needs a term's factor."""
    start = column_tile * s.block_n - term.start
    return s.n_tiles == 1 or ((start >= 0) & (start < term.width))


def _copy_factor(layout: _Layout, term: Term, column_tile, source, target, semaphore, act):
    """Acts on the copy of the columns of a factor that a column tile needs, if it needs any."""
    s = layout.schedule
    if s.n_tiles == 1:
        act(pltpu.make_async_copy(source, target, semaphore))
        return

    def copy(columns):
        part, place = source, target
        if columns < term.width:
            start = pl.multiple_of(column_tile * s.block_n - term.start, LANES)
            part = source.at[:, pl.ds(start, columns)]
        if columns < target.shape[1]:
            place = target.at[:, pl.ds(0, columns)]
        act(pltpu.make_async_copy(part, place, semaphore))

    width = min(s.block_n, term.width)
    last = column_tile == s.n_tiles - 1

    @pl.when(_needed(s, term, column_tile))
    def _():
        _last_or_whole(last, term.width % width or width, width, copy)


def _add_run(layout: _Layout, terms, acc, u, run_ring, column_tile, lo, hi, buffer):
    """Adds those terms to the rows of a run."""
    s = layout.schedule
    for i in terms:
        term = layout.terms[i]
        needed = _needed(s, term, column_tile)
        add = functools.partial(
            _add_term, layout, term, acc, u[i], run_ring[i], column_tile, lo, hi, buffer
        )
        if needed is True:
            add()
        else:
            pl.when(needed)(add)


def _add_term(layout: _Layout, term: Term, acc, u, ring, column_tile, lo, hi, buffer):
    """acc += u·B on the rows [lo, hi) of a run."""
    s = layout.schedule
    first_column = term.start if s.n_tiles == 1 else 0

    def window(first, height):
        rows = pl.ds(first, height)
        left = u[rows, :]

        def column(c, width):
            at = acc.at[term.half, rows, pl.ds(first_column + c, width)]
            delta = dot(left, ring[buffer, :, pl.ds(c, width)], 1, 0)
            keep = rows_within(first, (height, width), lo, hi)
            if term.kept is not None:
                place = term.start if s.n_tiles == 1 else column_tile * s.block_n
                index = place + c + lax.broadcasted_iota(jnp.int32, (height, width), 1)
                keep &= (index >= term.kept[0]) & (index < term.kept[1])
            at[...] = jnp.where(keep, at[...] + delta, at[...])

        blocks(ring.shape[2], COLUMNS, column)

    windows(lo, hi, s.block_m, s.run_heights, window)


def _store(layout: _Layout, y, acc, bias, lo, hi):
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
