"""A warpgroup of the Hopper attention kernel that multiplies: a tile of rows, all columns of O."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.accumulate import continued
from pallas_kernels.hopper.memory import views_of
from pallas_kernels.hopper.rolled import rolled, unknown
from pallas_kernels.hopper.store import store_rows
from pallas_kernels.paged_attention.gpu_join import inverse_of, mean
from pallas_kernels.paged_attention.gpu_sizes import BLOCK, LINE, ROWS, Sizes
from pallas_kernels.paged_attention.gpu_splits import (
    Sums,
    columns_of,
    join_split,
    lines_of,
    no_sums,
    no_sums_to_join,
    store_numbers,
    store_split,
    sums_of_sinks,
)
from pallas_kernels.paged_attention.gpu_units import Unit, stage_of, tile_of


class Consumer:
    """The warpgroup of this number, over the kernel's references."""

    def __init__(
        self,
        number: int,
        sizes: Sizes,
        one_split: bool,
        q,
        sinks,
        results,
        q_stage,
        stages,
        q_full,
        stored,
        full,
        empty,
        partial=None,
        weights=None,
        cleared=None,
    ):
        self.tile, self.part = divmod(number, sizes.consumers)
        self.sizes, self.one_split = sizes, one_split
        self.q, self.sinks = q, sinks
        self.y, self.memory, self.partial = results[0], results[1:], partial
        views = views_of(q_stage[self.tile], 2, 2, interpreted=sizes.interpreted)
        (self.q_load, self.q_stage), (self.out_store, self.out) = views
        self.stages, self.weights = stages, weights and weights[number]
        self.q_full, self.stored = q_full[self.tile], stored[self.tile]
        self.full, self.empty, self.cleared = full, empty, cleared

    def run(self, unit, units):
        """Computes unit(i) for each i below the number of this program's units."""
        lax.fori_loop(0, units, lambda i, step: self.compute(unit(i), i, step), jnp.int32(0))

    def compute(self, unit: Unit, i, step, beside=lambda: None):
        """Computes a unit; beside() while its queries come."""
        s, tile = self.sizes, tile_of(self.sizes, unit, self.tile)
        if self.part == 0:
            self.load_queries(tile, i)
        beside()
        plgpu.barrier_wait(self.q_full)
        attend = functools.partial(self.attend, unit, tile, self.positions_of_rows(tile))

        def attend_split(split, state):
            before, step = state
            first = jnp.maximum(unit.first_round, split * s.rounds)
            end = jnp.minimum(unit.end_round, (split + 1) * s.rounds)
            sums, step = lax.fori_loop(first, end, attend, (no_sums(s), step))
            sums = self.whole(sums)
            if s.spread:
                alone = unit.sees_one_split(s)
                pl.when(alone)(lambda: self.store_alone(unit, tile, split, sums))
                pl.when(~alone)(lambda: self.store_split(unit, split, sums))
                return before, step
            return self.join_split(unit, split, before, sums), step

        if self.one_split:
            start = no_sums(s), step
            sums, step = lax.fori_loop(unit.first_round, unit.end_round, attend, start)
            sums = self.after_sink(tile, self.whole(sums))
        else:
            start = None if s.spread else self.before_splits(tile), step
            sums, step = lax.fori_loop(unit.first_split, unit.end_split, attend_split, start)
        if s.spread:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.stored.at[0])
        else:
            self.finish(tile, sums)
        return step

    def whole(self, sums: Sums) -> Sums:
        """The sums with totals over the blocks of all consumers."""
        return sums

    def before_splits(self, tile: Unit) -> Sums:
        """What joining begins with: the rows' sinks, if they have any."""
        if self.sinks is None:
            return no_sums(self.sizes)
        return sums_of_sinks(self.sizes, self.sinks.at[tile.part])

    def after_sink(self, tile: Unit, sums: Sums) -> Sums:
        """The sums of a row's only split, joined with its sink if it has one."""
        return sums if self.sinks is None else join_split(self.before_splits(tile), sums)

    def store_split(self, unit: Unit, split, sums: Sums):
        store_split(self.sizes, unit, split, sums, self.memory, self.partial)

    def store_alone(self, unit: Unit, tile: Unit, split, sums: Sums):
        """The result of a tile that sees no other split, and word of it for who joins."""
        if self.part == 0:
            store_numbers(self.sizes, unit, split, no_sums_to_join(), self.memory)
        self.store(tile, self.after_sink(tile, sums))

    def join_split(self, unit: Unit, split, before: Sums, sums: Sums) -> Sums:
        """The sums up to the end of a split."""
        del unit, split
        return join_split(before, sums)

    def load_queries(self, tile: Unit, i):
        @pl.when(i > 0)
        def _wait():
            plgpu.barrier_wait(self.stored.at[0])

        s, first = self.sizes, tile.token

        def load(line):
            columns = columns_of(line)
            if s.boxes:
                rows = self.q.at[pl.ds(first, s.tile), self.heads_of(tile), columns]
            else:
                rows = self.q.at[tile.part, pl.ds(first * s.group, ROWS), columns]
            plgpu.copy_gmem_to_smem(rows, self.q_load.at[line], self.q_full)

        rolled(0, s.key_lines, first, load)

    def heads_of(self, unit: Unit):
        return pl.ds(unit.part * self.sizes.group, self.sizes.group)

    def attend(self, unit: Unit, tile: Unit, positions, round_, state, beside=lambda: None):
        """The sums with a round; beside() while the first products are made."""
        sums, step = state
        scores = self.scores(unit, tile, positions, round_, step, beside)
        maximum = jnp.maximum(sums.maximum, scores.max(axis=1))
        weights = weights_of(scores, maximum)
        sums = scaled_to(maximum, sums)
        total = sums.total + weights.sum(axis=1)
        weights = self.operand(weights.astype(self.q.dtype))
        give_back = [
            functools.partial(self.give_back, number, step) for number in range(len(self.empty))
        ]
        values = self.add_values(weights, stage_of(self.sizes, step), give_back, sums.values)
        return Sums(maximum, total, values), step + 1

    def operand(self, weights):
        """What gives P of the consumer's block, rounded, to a product."""
        if not self.sizes.interpreted:
            return lambda: weights
        self.weights[...] = weights
        return lambda: self.weights

    def give_back(self, number, step, owner=0):
        """Says that nobody needs a piece of a consumer's block any more."""
        plgpu.barrier_arrive(self.empty[number].at[stage_of(self.sizes, step, owner)])

    def scores(self, unit: Unit, tile: Unit, positions, block, step, beside=lambda: None):
        """Q · Kᵀ of the consumer's block, scaled for powers of two; -inf where a row may not look.

        Values of the block that no row of the unit may look at become zeros.
        """
        s, stage = self.sizes, stage_of(self.sizes, step, self.part)
        # Else the compiler keeps the addresses of all queries, for which there are no registers.
        zero = unknown(0, block)

        def multiply(accumulator):
            for piece, full in zip(s.pieces(self.part), self.full, strict=True):
                plgpu.barrier_wait(full.at[stage])
                for cache, i in piece:
                    for column in range(0, s.widths[cache], LINE):
                        line = sum(s.lines[:cache]) + (i * s.widths[cache] + column) // LINE
                        if line < s.key_lines:
                            keys = self.stages[cache].at[stage, i, :, pl.ds(column, LINE)].T
                            plgpu.wgmma(accumulator, self.q_stage.at[line + zero], keys)
            beside()
            plgpu.wgmma_wait(0)
            return accumulator[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, BLOCK)))
        first, stop = unit.first - block * BLOCK, unit.last + 1 - block * BLOCK

        @pl.when((first > 0) | (stop < BLOCK))
        def _clear_others():
            if self.tile == 0:
                self.clear_values(stage, first, stop)
                plgpu.commit_smem()
            if s.tiles > 1:
                plgpu.barrier_arrive(self.cleared)
                plgpu.barrier_wait(self.cleared)

        return self.masked(tile, positions, block, scores * (s.scale * math.log2(math.e)))

    def positions_of_rows(self, tile: Unit):
        """The position of each row's token."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        return tile.position + lax.div(row, jnp.int32(self.sizes.group))

    def masked(self, tile: Unit, positions, block, scores):
        """-inf where a row may not look."""
        window = self.sizes.window
        # Most blocks are seen whole, by all rows.
        hidden = (block + 1) * BLOCK - 1 > tile.position
        if window is not None:
            hidden |= block * BLOCK <= tile.last - window

        def mask(scores):
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            last = lax.broadcast_in_dim(positions - block * BLOCK, scores.shape, [0])
            visible = column <= last
            if window is not None:
                visible &= column > last - window
            return jnp.where(visible, scores, jnp.full_like(scores, -jnp.inf))

        return lax.cond(hidden, mask, lambda scores: scores, scores)

    def add_values(self, weights, stage, give_back, sums):
        """The sums plus P · V of a block, of this consumer's columns; gives back what they were.

        Args:
          weights: gives P, in registers or in shared memory.
          give_back: gives back columns, one for each of the sums, then what nobody needs after.
        """
        first = self.part * len(sums)

        def add(accumulators):
            left = weights()  # references are to be taken in here
            for number, accumulator in enumerate(accumulators, first):
                plgpu.wgmma(accumulator, left, self.values(stage, number))
            for done, its in enumerate(give_back, 1):
                plgpu.wgmma_wait(max(0, len(sums) - done))
                its()

        return tuple(continued(list(sums), add, self.sizes.interpreted))

    def values(self, stage, number):
        return self.stages[self.sizes.value_cache].at[stage, number]

    def clear_values(self, stage, first, stop):
        """Zeroes a block's values outside of [first, stop)."""
        s = self.sizes
        lines = jnp.int32(s.value_width // LINE)

        def clear(number):
            values = self.values(stage, lax.div(number, lines))
            tile = values.at[:, columns_of(lax.rem(number, lines))]
            values = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
            seen = (row >= first) & (row < stop)
            tile[...] = jnp.where(seen, values, jnp.zeros_like(values))

        rolled(0, s.value_lines, stage, clear)

    def finish(self, tile: Unit, sums: Sums):
        self.store(tile, sums)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.stored.at[0])

    def store(self, tile: Unit, sums: Sums):
        """Stores the weighted means; zeros for padding tokens."""
        inverse = lax.broadcast_in_dim(inverse_of(sums.total), (ROWS, LINE), [0])
        first = self.part * self.sizes.own_columns // LINE
        lines = lines_of(sums.values)
        for line, its in enumerate(lines, first):
            self.out.at[line][...] = mean(its, inverse).astype(self.out.dtype)
        plgpu.commit_smem()
        store = functools.partial(self.store_line, tile)
        rolled(first, first + len(lines), tile.token, store)

    def store_line(self, tile: Unit, line):
        s, y, columns = self.sizes, self.y, columns_of(line)
        rows, first, count = self.out_store.at[line], tile.token, tile.tokens
        if s.boxes:
            store_rows(rows, y, first, count, s.tile, self.heads_of(tile), columns)
        else:
            store_rows(rows, y.at[tile.part], first * s.group, count * s.group, ROWS, columns)


def weights_of(scores, maximum):
    """P: powers of two of how far scores are below a maximum."""
    return jnp.exp2(scores - lax.broadcast_in_dim(_finite(maximum), scores.shape, [0]))


def scaled_to(maximum, sums: Sums) -> Sums:
    """The sums with another maximum, no lower than theirs."""
    factor = factor_to(maximum, sums.maximum)
    of_row = lax.broadcast_in_dim(factor, sums.values[0].shape, [0])
    values = tuple(its * of_row for its in sums.values)
    return Sums(maximum, sums.total * factor, values)


def factor_to(maximum, before):
    """What sums with the maximum before are multiplied with."""
    return jnp.exp2(before - _finite(maximum))


def _finite(maximum):
    """Before a row's first visible block the maximum is -inf: keeps the arithmetic finite."""
    return jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
