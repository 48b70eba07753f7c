"""Rank classes in the Hopper kernels, which work on one slot at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl


class RankClass(NamedTuple):
    """The slots from the first up to the end; of the last class, all from the first on.

    So every slot is of one class exactly, and a single class asks nothing of it.
    """

    first: int
    end: int | None

    def when(self, slot, body):
        """Runs the body if the slot is of this class."""
        condition = self.has(slot)
        if condition is None:
            body()
        else:
            pl.when(condition)(body)

    def select(self, slot, value, other):
        """The value if the slot is of this class."""
        condition = self.has(slot)
        return value if condition is None else jnp.where(condition, value, other)

    def has(self, slot):
        """None: always."""
        if self.end is None:
            return slot >= self.first if self.first else None
        return (slot >= self.first) & (slot < self.end) if self.first else slot < self.end

    def own(self, slot):
        """The slot's number in the class."""
        return slot - self.first if self.first else slot

    def some(self, slot):
        """The same, and some number of the class for slots of others."""
        if self.first:
            slot = jnp.maximum(slot - self.first, 0)
        return slot if self.end is None else jnp.minimum(slot, self.end - self.first - 1)


def rank_classes(firsts: tuple[int, ...]) -> tuple[RankClass, ...]:
    """Of the first slots of each, in order; the first is slot 0."""
    return tuple(map(RankClass, firsts, (*firsts[1:], None)))
