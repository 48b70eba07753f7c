"""How the features of a product are cut into slices, one for each tile of some rows."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl


def columns_of_terms(width: int, starts, widths) -> tuple[int, ...]:
    """The widths of columns between all places where a term begins or ends."""
    ends = (start + its for start, its in zip(starts, widths, strict=True))
    places = sorted({0, width, *starts, *ends})
    return tuple(end - begin for begin, end in itertools.pairwise(places))


class Slices(NamedTuple):
    """Slices of equally many features, but for the last ones.

    Attributes:
      features: of a slice.
      columns: widths of those that have slices of their own. The last one of some columns has what
        is left of them, and is multiplied with features of others for nothing.
    """

    features: int
    columns: tuple[int, ...]

    @classmethod
    def of(cls, columns: tuple[int, ...], features: int) -> Slices:
        """Cuts columns apart only where slices of all would not end where some end."""
        apart = any(width % features for width in columns[:-1])
        return cls(features, columns if apart else (sum(columns),))

    @property
    def apart(self) -> bool:
        return len(self.columns) > 1

    @property
    def counts(self) -> tuple[int, ...]:
        """How many some columns have each."""
        return tuple(pl.cdiv(width, self.features) for width in self.columns)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first feature of some columns each."""
        return tuple(itertools.accumulate(self.columns[:-1], initial=0))

    def first_feature(self, number):
        """Of the slice of this number."""
        first, before = number * self.features, 0
        for start, count in zip(self.starts[1:], self.counts, strict=False):
            before += count
            first = jnp.where(number < before, first, start + (number - before) * self.features)
        return first

    @property
    def widths(self) -> tuple[int, ...]:
        """How many features slices have whose columns are apart, the most first."""
        rests = {width % self.features or self.features for width in self.columns}
        return tuple(sorted({self.features, *rests}, reverse=True))

    def width_of(self, feature):
        """How many the slice has that begins with a feature."""
        end = jnp.int32(sum(self.columns))
        for start in reversed(self.starts[1:]):
            end = jnp.where(feature < start, start, end)
        return jnp.minimum(end - feature, self.features)
