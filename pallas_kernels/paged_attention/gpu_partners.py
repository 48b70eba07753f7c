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
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_consumer import Consumer, scaled_to, weights_of
from pallas_kernels.paged_attention.gpu_sizes import LINE
from pallas_kernels.paged_attention.gpu_splits import Sums
from pallas_kernels.paged_attention.gpu_units import Unit, stage_of


class Partner(Consumer):
    """One of the two."""

    def __init__(self, *arguments, maxima, totals, published, **scratch):
        super().__init__(*arguments, **scratch)
        self.other = 1 - self.part
        self.maxima, self.totals, self.published = maxima, totals, published

    def attend(self, unit: Unit, tile: Unit, positions, round_, state):
        sums, step = state
        scores = self.scores(unit, tile, positions, 2 * round_ + self.part, step)
        if self.part == 0:
            maximum = jnp.maximum(sums.maximum, scores.max(axis=1))
            weights, total = self.publish(scores, maximum, step)
            sums = self.add_own(weights, total, scaled_to(maximum, sums), step)
            sums = self.add_others(scaled_to(self.maximum_of_other(), sums), step)
        else:
            before = self.maximum_of_other()
            maximum = jnp.maximum(before, scores.max(axis=1))
            weights, total = self.publish(scores, maximum, step)
            sums = self.add_others(scaled_to(before, sums), step)
            sums = self.add_own(weights, total, scaled_to(maximum, sums), step)
        return sums, step + 2

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

    def add_own(self, weights, total, sums: Sums, step) -> Sums:
        def in_registers():
            return weights

        # The interpreter multiplies only what is in shared memory.
        in_memory = functools.partial(self.weights_in_memory, self.part, step)
        get = in_memory if self.sizes.interpreted else in_registers
        stage, half = stage_of(self.sizes, step + self.part), len(self.empty) // 2
        values = self.add_values(get, stage, self.empty[:half], sums.values)
        return Sums(sums.maximum, sums.total + total, values)

    def add_others(self, sums: Sums, step) -> Sums:
        stage, half = stage_of(self.sizes, step + self.other), len(self.empty) // 2
        # Its owner waited for them as well, but only a wait of its own makes a warpgroup see them.
        for full in self.full[half:]:
            plgpu.barrier_wait(full.at[stage])
        get = functools.partial(self.weights_in_memory, self.other, step)
        values = self.add_values(get, stage, self.empty[half:], sums.values)
        return Sums(sums.maximum, sums.total, values)

    def weights_in_memory(self, owner, step):
        """Where P of a block is: its rotary keys are past all products."""
        rotary = self.stages[self.sizes.value_cache + 1]
        return rotary.at[stage_of(self.sizes, step + owner), 0, :, pl.ds(0, LINE)]

    def whole_total(self, total):
        self.totals[self.part] = total
        super().whole_total(total)
        return _of_rows(self.totals.at[0]) + _of_rows(self.totals.at[1])


def _of_rows(memory):
    """One number for each row."""
    numbers = plgpu.load(memory, layout=plgpu.Layout.WGMMA.reduce(1))
    return plgpu.layout_cast(numbers, plgpu.Layout.WGMMA.reduce(1))
