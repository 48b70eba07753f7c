"""The sums of a split of a sequence for one token's heads that share keys and values.

Positions and columns of values are the M side of the tensor cores, heads the N side: of 64 rows of
(token, head) all but a few would be empty. For softmax scores are turned to a tile of 64 rows
(block, head), where a row's numbers are made as those of a row of one block are in
`paged_attention/gpu_consumer.py`; so are the sums of values, block by block. Bits are the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.accumulate import continued
from pallas_kernels.hopper.rolled import rolled
from pallas_kernels.hopper.store import store_registers, store_turned
from pallas_kernels.paged_attention.gpu_consumer import factor_to, weights_of
from pallas_kernels.paged_attention.gpu_sizes import BLOCK, LINE, ROWS, Sizes
from pallas_kernels.paged_attention.gpu_splits import columns_of
from pallas_kernels.rotated_attention.gpu_token import Blocks, Token

MOST_HEADS = 16  # that share keys and values: rows of a block
OF_ROWS, OF_HEADS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
FACTOR, TOTAL, MAXIMUM = range(3)  # of a block and a head


def rows_of_heads(s: Sizes) -> int:
    """The tensor cores take heads by 8."""
    return -(-s.group // 8) * 8


def rows_of_block(block, heads: int):
    """Of a tile of 64 rows (block, head)."""
    return pl.ds(block * MOST_HEADS, heads)


class Shared(NamedTuple):
    """Shared memory between the steps of a split.

    Attributes:
      scores: float32 [64, 64], in longer rows, so that these do not begin in the same bank.
      maxima: of each row of scores, after those of blocks before the first, which are -inf.
      weights: [64, 64], for the tensor cores. numbers: float32 [3, 64]: FACTOR, TOTAL, MAXIMUM.
      sums: float32 [heads, columns of values].
    """

    scores: jax.Array
    maxima: jax.Array
    weights: jax.Array
    numbers: jax.Array
    sums: jax.Array

    @classmethod
    def of(cls, s: Sizes, dtype):
        """What a kernel asks for."""
        tiled = plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(128)
        return cls(
            scores=plgpu.SMEM((ROWS, BLOCK + 8), jnp.float32),
            maxima=plgpu.SMEM((2 * ROWS,), jnp.float32),
            weights=plgpu.SMEM((ROWS, BLOCK), dtype, transforms=tiled),
            numbers=plgpu.SMEM((3, ROWS), jnp.float32),
            sums=plgpu.SMEM((rows_of_heads(s), s.value_lines * LINE), jnp.float32),
        )

    def begin(self):
        """To be called once, by the warpgroup that makes the sums."""
        nothing = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), OF_ROWS)
        self.maxima.at[pl.ds(0, ROWS)][...] = nothing


class Sums(NamedTuple):
    """As `gpu_splits.Sums`, but the heads are columns, and values `[64 columns, heads]`."""

    maximum: jax.Array
    total: jax.Array
    values: tuple[jax.Array, ...]


def sums_of_split(
    s: Sizes, token: Token, split, count, queries, keys: Blocks, values: Blocks, shared: Shared
) -> Sums:
    """Of the blocks that the token sees of a split, which it gives back if there are any.

    Args:
      count: how many these are.
      queries: [lines, rows, 64], the part's heads in the first rows.
    """
    _score(s, token, split, count, queries, keys, shared)
    pl.when(count > 0)(lambda: plgpu.barrier_arrive(keys.empty))
    # Rows of blocks that are not seen are anything, and so are their numbers.
    scores = shared.scores.at[:, pl.ds(0, BLOCK)]
    scores = plgpu.load(scores, layout=plgpu.Layout.WGMMA, optimized=False)
    before, maximum = _maxima(s, scores.max(axis=1), shared)
    weights = weights_of(scores, maximum)
    shared.weights[...] = weights.astype(queries.dtype)
    of_rows = {
        FACTOR: factor_to(maximum, before),
        TOTAL: weights.sum(axis=1),
        MAXIMUM: maximum,
    }
    for number, its in of_rows.items():
        shared.numbers.at[number][...] = its
    plgpu.commit_smem()
    sums = _add_values(s, token, split, count, values, shared)
    pl.when(count > 0)(lambda: plgpu.barrier_arrive(values.empty))
    return sums


def _score(s: Sizes, token: Token, split, count, queries, keys: Blocks, shared: Shared):
    """Q · Kᵀ of each block, scaled for powers of two; -inf after the token's position."""
    heads = rows_of_heads(s)

    def score(block, carry):
        def multiply(accumulator):
            for line in range(s.key_lines):
                columns = pl.ds(line * LINE, LINE)
                rows = queries.at[line, pl.ds(0, heads)].T
                plgpu.wgmma(accumulator, keys.stage.at[block, :, columns], rows)
            plgpu.wgmma_wait(0)
            return accumulator[...]

        plgpu.barrier_wait(keys.full.at[block])
        scores = pl.run_scoped(multiply, plgpu.ACC((BLOCK, heads)))
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        visible = row <= token.last_seen(split, block)
        scores = scores * (s.scale * math.log2(math.e))
        scores = jnp.where(visible, scores, jnp.full_like(scores, -jnp.inf))
        target = shared.scores.at[rows_of_block(block, heads), pl.ds(0, BLOCK)]
        store_turned(target, scores, swizzled=False)
        return carry

    lax.fori_loop(0, count, score, None)
    plgpu.commit_smem()


def _maxima(s: Sizes, of_rows, shared: Shared):
    """Of each block and head the maximum of the blocks before, and with its own."""
    first = MOST_HEADS * (s.rounds - 1)
    shared.maxima.at[pl.ds(first, ROWS)][...] = of_rows
    plgpu.commit_smem()

    def maximum_before(distance):
        rows = shared.maxima.at[pl.ds(first - distance * MOST_HEADS, ROWS)]
        return plgpu.load(rows, layout=OF_ROWS, optimized=False)

    before = maximum_before(1)
    for distance in range(2, s.rounds):
        before = jnp.maximum(before, maximum_before(distance))
    return before, jnp.maximum(before, of_rows)


def _add_values(s: Sizes, token: Token, split, count, values: Blocks, shared: Shared) -> Sums:
    heads = rows_of_heads(s)

    def of_block(number, block):
        its = shared.numbers.at[number, rows_of_block(block, heads)]
        return plgpu.load(its, layout=OF_HEADS, optimized=False)

    def add_block(block, state):
        total, sums = state
        plgpu.barrier_wait(values.full.at[block])
        pl.when(block == count - 1)(lambda: _clear_unseen(s, token, split, block, values.stage))
        factor = of_block(FACTOR, block)
        total = total * factor + of_block(TOTAL, block)
        sums = [its * lax.broadcast_in_dim(factor, its.shape, [1]) for its in sums]

        def add(accumulators):
            weights = shared.weights.at[rows_of_block(block, heads)].T
            for line, accumulator in enumerate(accumulators):
                columns = values.stage.at[block, :, pl.ds(line * LINE, LINE)].T
                plgpu.wgmma(accumulator, columns, weights)
            plgpu.wgmma_wait(0)

        return total, tuple(continued(sums, add, s.interpreted))

    total = plgpu.layout_cast(jnp.zeros(heads, jnp.float32), OF_HEADS)
    zeros = plgpu.layout_cast(jnp.zeros((LINE, heads), jnp.float32), plgpu.Layout.WGMMA)
    start = total, (zeros,) * s.value_lines
    total, sums = lax.fori_loop(0, count, add_block, start)
    return Sums(of_block(MAXIMUM, jnp.maximum(count - 1, 0)), total, sums)


def _clear_unseen(s: Sizes, token: Token, split, block, values):
    """Zeroes values after the token's position in a block, where there are any."""
    last = token.last_seen(split, block)

    @pl.when(last < BLOCK - 1)
    def _clear():
        def clear(line):
            tile = values.at[block, :, columns_of(line)]
            its = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, its.shape, 0, layout=plgpu.Layout.WGMMA)
            tile[...] = jnp.where(row <= last, its, jnp.zeros_like(its))

        rolled(0, s.value_lines, split, clear)
        plgpu.commit_smem()


def store_sums(s: Sizes, token, part, split, are_any, sums: Sums, memory, shared: Shared):
    """Stores a split's sums of a token in `gpu_splits.memory_of_sums`, if there are any."""
    lines, maxima, totals = memory

    @pl.when(are_any)
    def _store():
        heads = pl.ds(token * ROWS, rows_of_heads(s))
        store_registers(maxima.at[part, split, heads], sums.maximum, swizzled=False)
        store_registers(totals.at[part, split, heads], sums.total, swizzled=False)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for line, its in enumerate(sums.values):
        store_turned(shared.sums.at[:, pl.ds(line * LINE, LINE)], its, swizzled=False)
    plgpu.commit_smem()

    @pl.when(are_any)
    def _copy():
        rows = pl.ds(token * s.rows_of_sums, s.group)
        plgpu.copy_smem_to_gmem(shared.sums.at[pl.ds(0, s.group)], lines.at[part, split, rows])
