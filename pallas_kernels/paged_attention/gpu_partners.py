"""Two warpgroups that share O's columns, as one cannot hold the sums of so many.

A round is two blocks. Each partner makes S and P of one of them, and adds P · V of both to its
half of O. What it makes goes to the other by shared memory: P by the place of its block's rotary
keys, which nobody needs any more, and the maximum up to and with this block, where that of the next
block begins. So they are out of step, and one multiplies while the other has its softmax:

    first    Q · K₀   softmax₀   P₀ · V₀   (waits)    P₁ · V₁
    second   Q · K₁   (waits)    softmax₁  P₀ · V₀    P₁ · V₁

Shared memory holds but one round, so blocks are loaded and given back in small pieces: first those
of the half whose sums their owner has.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_consumer import Consumer, scaled_to, weights_of
from pallas_kernels.paged_attention.gpu_join import factors, joined
from pallas_kernels.paged_attention.gpu_sizes import LINE, ROWS
from pallas_kernels.paged_attention.gpu_splits import (
    PIECE,
    Sums,
    no_sums,
    place_of_split,
    store_numbers,
)
from pallas_kernels.paged_attention.gpu_units import Unit, stage_of


class Partner(Consumer):
    """One of the two."""

    def __init__(self, *arguments, maxima, totals, kept, published, scored, **scratch):
        super().__init__(*arguments, **scratch)
        self.other = 1 - self.part
        self.maxima, self.totals, self.kept = maxima, totals, kept
        self.published, self.scored = published, scored

    def attend(self, unit: Unit, tile: Unit, positions, round_, state):
        sums, step = state
        give_back = self.givers(unit, round_, step)
        scores = self.scores(unit, tile, positions, 2 * round_ + self.part, step)
        if self.part == 0:
            maximum = jnp.maximum(sums.maximum, scores.max(axis=1))
            weights, total = self.publish(scores, maximum, step)
            sums = self.add_own(weights, total, scaled_to(maximum, sums), step, give_back)
            sums = self.add_others(scaled_to(self.maximum_of_other(), sums), step, give_back)
        else:
            before = self.maximum_of_other()
            maximum = jnp.maximum(before, scores.max(axis=1))
            weights, total = self.publish(scores, maximum, step)
            sums = self.add_others(scaled_to(before, sums), step, give_back)
            sums = self.add_own(weights, total, scaled_to(maximum, sums), step, give_back)
        return sums, step + 2

    def givers(self, unit: Unit, round_, step):
        """give_back(owner, number): of a round, the piece of this number of a partner's block."""
        del unit, round_
        return lambda owner, number: self.give_back(number, step, owner)

    def publish(self, scores, maximum, step):
        """Makes P, which it returns with the rows' sums, and lets the other have it."""
        weights = weights_of(scores, maximum)
        rounded = weights.astype(self.q.dtype)
        self.maxima[self.part] = maximum
        self.weights_in_memory(self.part, step)[...] = rounded
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.published.at[self.part])
        return rounded, weights.sum(axis=1)

    def maximum_of_other(self):
        """Waits for the other's block: its P is there, too."""
        plgpu.barrier_wait(self.published.at[self.other])
        return _of_rows(self.maxima.at[self.other])

    def add_own(self, weights, total, sums: Sums, step, give_back) -> Sums:
        own, _ = self.pieces_added()
        stage = stage_of(self.sizes, step, self.part)
        give_back = [functools.partial(give_back, self.part, number) for number in own]
        values = self.add_values(self.operand(weights), stage, give_back, sums.values)
        return Sums(sums.maximum, sums.total + total, values)

    def add_others(self, sums: Sums, step, give_back) -> Sums:
        get = functools.partial(self.weights_in_memory, self.other, step)
        _, others = self.pieces_added()
        stage = stage_of(self.sizes, step, self.other)
        # Its owner waited for them as well, but only a wait of its own makes a warpgroup see them.
        for number in others:
            plgpu.barrier_wait(self.full[number].at[stage])
        give_back = [functools.partial(give_back, self.other, number) for number in others]
        values = self.add_values(get, stage, give_back, sums.values)
        return Sums(sums.maximum, sums.total, values)

    def pieces_added(self):
        """Which pieces of its own block, and of the other's, a partner is the last to need."""
        pieces = range(len(self.full))
        half = len(pieces) // 2
        return pieces[:half], pieces[half:]

    def weights_in_memory(self, owner, step):
        """Where P of a block is: its rotary keys are past all products."""
        rotary = self.stages[self.sizes.value_cache + 1]
        return rotary.at[stage_of(self.sizes, step, owner), 0, :, pl.ds(0, LINE)]

    def whole(self, sums: Sums) -> Sums:
        """The sums with both partners' totals. Nobody reads the queries any more then."""
        self.totals[self.part] = sums.total
        plgpu.barrier_arrive(self.scored)
        plgpu.barrier_wait(self.scored)
        total = _of_rows(self.totals.at[0]) + _of_rows(self.totals.at[1])
        return sums._replace(total=total)

    def store_split(self, unit: Unit, split, sums: Sums):
        s, memory = self.sizes, self.memory
        if self.part == 0:
            store_numbers(s, unit, split, sums, memory)
        place, rows = place_of_split(s, unit, split), pl.ds(unit.token * ROWS, ROWS)
        for number, its in enumerate(sums.values):
            columns = pl.ds(self.part * s.own_columns + number * s.value_width, s.value_width)
            memory[0].at[*place, rows, columns][...] = its

    def join_split(self, unit: Unit, split, before: Sums, sums: Sums) -> Sums:
        """In memory of this program's own are the sums before a split, and then with it."""
        del before
        is_first = split == unit.first_split
        pl.when(is_first)(lambda: self.keep(no_sums(self.sizes)))
        before, total_before = (_of_rows(its.at[self.part]) for its in self.kept)
        maximum, *both = factors(before, sums.maximum)
        total = joined(total_before, both[0], sums.total, both[1])
        both = [lax.broadcast_in_dim(factor, (ROWS, PIECE), [0]) for factor in both]

        def join(number, its):
            # All loads before the first join, whose barrier they would wait for.
            pieces = [(first, _of_piece(place)) for first, place in self.places(number)]
            joint = [
                joined(piece, both[0], its[:, first : first + PIECE], both[1])
                for first, piece in pieces
            ]
            return jnp.concatenate(joint, axis=1)

        values = lax.cond(
            is_first,
            lambda values: values,
            lambda values: [join(*its) for its in enumerate(values)],
            list(sums.values),
        )
        sums = Sums(maximum, total, tuple(values))

        @pl.when(split + 1 < unit.end_split)
        def _keep():
            self.keep(sums)
            for number, its in enumerate(values):
                for first, place in self.places(number):
                    place[...] = its[:, first : first + PIECE]

        return sums

    def keep(self, sums: Sums):
        """The numbers of rows, in shared memory."""
        for its, values in zip(self.kept, (sums.maximum, sums.total), strict=True):
            its[self.part] = values
        plgpu.commit_smem()

    def places(self, number):
        """Where in memory the columns of a product are, a few after each other."""
        memory, width = self.memory[0], self.sizes.value_width
        of_program = memory.at[lax.axis_index("program")]
        product = self.part * (self.sizes.own_columns // width) + number
        for piece in range(width // PIECE):
            yield piece * PIECE, of_program.at[product * (width // PIECE) + piece]


def _of_rows(memory):
    """One number for each row."""
    numbers = plgpu.load(memory, layout=plgpu.Layout.WGMMA.reduce(1))
    return plgpu.layout_cast(numbers, plgpu.Layout.WGMMA.reduce(1))


def _of_piece(memory):
    """Some columns of all rows, from global memory."""
    return plgpu.load(memory, layout=plgpu.Layout.WGMMA, optimized=False)
