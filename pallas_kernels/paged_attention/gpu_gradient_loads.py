"""Who loads the blocks of attention's gradient, step after step, through a ring of stages.

A warpgroup that does no more, which gives its registers to the consumers. Where registers do not
move, these have as many as they need only if there are but two of them. Then the first consumer
loads as well: in each step, while products of it run, what takes the place of the step before. By
then the other consumer, too, is through with that, or nearly so.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import implementation
from pallas_kernels.hopper.memory import drain
from pallas_kernels.paged_attention.gpu_gradient_units import CONSUMERS, TILE, Unit, Units


def warpgroups() -> int:
    return CONSUMERS + implementation.REGISTERS_MOVE


def run_units(units: Units, kernel, stages: int):
    """Computes a program's units.

    Args:
      kernel: has `steps_of(unit)`; `load(unit, i, stage)`, which loads a unit's i-th step; `empty`,
        barriers of the stages that consumers have given back; and `compute_unit`.
    """
    warpgroup = lax.axis_index("warpgroup")
    registers_move = implementation.REGISTERS_MOVE

    if registers_move:

        @pl.when(warpgroup == CONSUMERS)
        def _memory():
            plgpu.set_max_registers(24, action="decrease")
            _load_all(units, kernel, stages)

    @pl.when(warpgroup < CONSUMERS)
    def _compute():
        if registers_move:
            plgpu.set_max_registers(240, action="increase")
        loads = NoLoads() if registers_move else Loads(units, kernel, stages, warpgroup)

        def compute(i, state):
            return kernel.compute_unit(units.at(i), *state, warpgroup, loads)

        state = lax.fori_loop(0, units.mine, compute, (jnp.int32(0), loads.begin()))
        loads.end(state[0])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load_all(units: Units, kernel, stages: int):
    def load_unit(number, step):
        unit = units.at(number)

        def load(i, step):
            kernel.load(unit, i, _acquire(kernel.empty, step, stages))
            return step + 1

        return lax.fori_loop(0, kernel.steps_of(unit), load, step)

    steps = lax.fori_loop(0, units.mine, load_unit, jnp.int32(0))
    drain(kernel.empty, steps, stages)


def _acquire(empty, step, stages: int):
    """The stage of a step, once its last use has ended."""
    stage = lax.rem(step, jnp.int32(stages))

    @pl.when(step >= stages)
    def _wait():
        plgpu.barrier_wait(empty.at[stage])

    return stage


class NoLoads:
    """What a consumer loads where another warpgroup does."""

    def begin(self):
        return None

    def load(self, place, step):
        del step
        return place

    def end(self, steps):
        del steps


class Place(NamedTuple):
    """Of the next step to be loaded: its unit's number and the unit itself, and the step in it."""

    number: jax.Array
    place: jax.Array
    tile: jax.Array
    blocks: jax.Array
    part: jax.Array
    i: jax.Array

    @property
    def unit(self) -> Unit:
        return Unit(pl.multiple_of(self.place, TILE), self.tile, self.blocks, self.part)


class Loads:
    """What the first consumer loads; the second goes the same way, and loads nothing."""

    def __init__(self, units: Units, kernel, stages: int, warpgroup):
        self.units, self.kernel, self.stages = units, kernel, stages
        self.is_first = warpgroup == 0

    def begin(self) -> Place:
        """Fills the ring."""
        place = lax.cond(
            self.units.mine > 0, lambda: self._first_of(0), lambda: Place(*[jnp.int32(0)] * 6)
        )
        return lax.fori_loop(0, self.stages, lambda step, place: self._load(place, step), place)

    def load(self, place: Place, step) -> Place:
        """Loads what comes after the step before this one, in its stage."""
        return lax.cond(
            step > 0,
            lambda place: self._load(place, step - 1 + self.stages),
            lambda place: place,
            place,
        )

    def end(self, steps):
        pl.when(self.is_first)(lambda: drain(self.kernel.empty, steps, self.stages))

    def _load(self, place: Place, step) -> Place:
        is_left = place.number < self.units.mine

        @pl.when(self.is_first & is_left)
        def _load():
            stage = _acquire(self.kernel.empty, step, self.stages)
            self.kernel.load(place.unit, place.i, stage)

        return lax.cond(is_left, self._after, lambda place: place, place)

    def _after(self, place: Place) -> Place:
        return lax.cond(
            place.i + 1 < self.kernel.steps_of(place.unit),
            lambda: place._replace(i=place.i + 1),
            lambda: self._first_of(place.number + 1),
        )

    def _first_of(self, number) -> Place:
        """The first step of a unit; past the last one, of any."""
        unit = self.units.at(jnp.minimum(number, self.units.mine - 1))
        numbers = number, unit.place, unit.number, unit.blocks, unit.part, 0
        return Place(*(jnp.asarray(its, jnp.int32) for its in numbers))
