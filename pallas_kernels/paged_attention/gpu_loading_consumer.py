"""The first of two tiles' warpgroups, where it loads the blocks of both as well.

Where registers do not move, two warpgroups have as many as they need only if there is no third.
Blocks go through the same ring of stages. In each step, when the products of queries and keys are
on their way, the block that is some steps ahead takes the place of one that the other consumer,
too, needed some steps ago: so nobody waits, unless the other is that far behind.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import drain
from pallas_kernels.paged_attention.gpu_consumer import Consumer
from pallas_kernels.paged_attention.gpu_units import Loader, Unit, floor, stage_of

MOST_BEHIND = 2  # steps that the other may be behind


class Ahead(NamedTuple):
    """The next block to be loaded: a round of the program's unit of this number, and its places."""

    number: jax.Array
    unit: Unit
    round_: jax.Array
    places: tuple


class LoadingConsumer(Consumer):
    """Loads as it multiplies."""

    def __init__(self, loader: Loader, *arguments, **scratch):
        super().__init__(*arguments, **scratch)
        self.loader = loader
        self.distance = self.sizes.stages - min(MOST_BEHIND, self.sizes.stages - 1)

    def run(self, unit, units):
        self.unit, self.units = unit, units

        def load(step, ahead):
            self.load(ahead, step)
            return self.after(ahead)

        ahead = lax.fori_loop(0, self.distance, load, self.first_from(jnp.int32(0)))
        state = jnp.int32(0), ahead
        steps, _ = lax.fori_loop(0, units, lambda i, state: self.compute(unit(i), i, state), state)
        for empty in self.empty:
            drain(empty, steps, self.sizes.stages)

    def attend(self, unit, tile, positions, round_, state):
        sums, (step, ahead) = state
        load = functools.partial(self.load, ahead, step + self.distance)
        sums, step = super().attend(unit, tile, positions, round_, (sums, step), load)
        return sums, (step, self.after(ahead))

    def load(self, ahead: Ahead, step):
        """Loads what is used in a step, if there is one."""
        stage = stage_of(self.sizes, step)

        @pl.when(ahead.number < self.units)
        def _load():
            @pl.when(step >= self.sizes.stages)
            def _wait():
                for empty in self.empty:
                    plgpu.barrier_wait(empty.at[stage])

            head = floor(ahead.unit.part, self.sizes.units_of_head)
            for number in range(len(self.full)):
                self.loader.load_piece(ahead.places, head, 0, number, stage)

    def after(self, ahead: Ahead) -> Ahead:
        """What comes after it. Where it is, is read now, and needed a step later."""
        number, unit, round_, _ = ahead
        return lax.cond(
            round_ + 1 < unit.end_round,
            lambda: self.block(number, unit, round_ + 1),
            lambda: self.first_from(number + 1),
        )

    def first_from(self, number) -> Ahead:
        """The first block of this unit, or of one after it: padding has none."""

        def its(number):
            return self.unit(jnp.minimum(number, jnp.maximum(self.units - 1, 0)))

        number = lax.while_loop(
            lambda number: (number < self.units) & ~its(number).has_rounds,
            lambda number: number + 1,
            number,
        )
        return self.block(number, its(number), its(number).first_round)

    def block(self, number, unit: Unit, round_) -> Ahead:
        return Ahead(number, unit, round_, self.loader.places_of_round(unit, round_))
