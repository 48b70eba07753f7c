"""Two warpgroups that share O's columns, and load what they multiply: nobody else does.

Each piece of a block has one partner who is the last to need it. When it is through with a piece it
loads, to the same place, as memory has room for one round, that of the next round: of the same unit
or of the program's next one. So nothing has to be said to anyone, and two warpgroups have all
registers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_partners import Partner
from pallas_kernels.paged_attention.gpu_units import Loader, Unit, stage_of

HEAD = 0  # of the cache: latents have one


@dataclasses.dataclass(frozen=True)
class FollowedUnit(Unit):
    """A unit, and what reads the one that the program has next: it may have no rounds."""

    following: Callable[[], Unit]


class LoadingPartner(Partner):
    """One of the two."""

    def __init__(self, loader: Loader, *arguments, **scratch):
        super().__init__(*arguments, empty=None, **scratch)
        self.loader = loader

    def run(self, unit, units):
        def following(i):
            its = unit(jnp.minimum(i, units - 1))
            return dataclasses.replace(
                its, end_round=jnp.where(i < units, its.end_round, its.first_round)
            )

        def compute(i, step):
            its = FollowedUnit(**vars(unit(i)), following=lambda: following(i + 1))
            is_loaded = (i > 0) & unit(jnp.maximum(i - 1, 0)).has_rounds

            def load():
                pl.when(its.has_rounds & ~is_loaded)(lambda: self.load_first(its, step))

            return self.compute(its, i, step, load)

        lax.fori_loop(0, units, compute, jnp.int32(0))

    def load_first(self, unit: Unit, step):
        """Loads its pieces of a unit's first round, where the unit before had none to load it."""
        places = self.loader.places_of_round(unit, unit.first_round)
        for owner, pieces in zip((self.part, self.other), self.pieces_added(), strict=True):
            for number in pieces:
                self.load(places, owner, number, step)

    def load(self, places, owner, number, step):
        stage = stage_of(self.sizes, step, owner)
        self.loader.load_piece(places, HEAD, owner, number, stage)

    def givers(self, unit: FollowedUnit, round_, step):
        # Read now, needed when this round's products are done.
        comes, places = lax.cond(
            round_ + 1 < unit.end_round,
            lambda: (jnp.bool(True), self.loader.places_of_round(unit, round_ + 1)),
            lambda: self.first_of(unit.following()),
        )

        def give_back(owner, number):
            plgpu.commit_smem()  # no warp reads any more what was there
            pl.when(comes)(lambda: self.load(places, owner, number, step))

        return give_back

    def first_of(self, unit: Unit):
        """Whether a unit has a round, and where the first one's blocks are."""
        return unit.has_rounds, self.loader.places_of_round(unit, unit.first_round)
