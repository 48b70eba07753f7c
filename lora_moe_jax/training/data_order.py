"""`DataOrder`: which example comes next. Three integers, so that a run can be taken up again."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np


@dataclass
class DataOrder:
    """An endless order of examples: every epoch has each of them once, shuffled by the seed.

    The fields are its whole state: `DataOrder(**dataclasses.asdict(order))` goes on where it is.

    Attributes:
      size: how many examples there are, at least one.
      taken: how many were taken so far.
    """

    size: int
    seed: int = 0
    taken: int = 0

    @property
    def epochs(self) -> float:
        """How often the data have been gone through."""
        return self.taken / self.size

    def peek(self) -> int:
        """The next example's index."""
        epoch, place = divmod(self.taken, self.size)
        return int(_shuffled(self.size, self.seed, epoch)[place])

    def take(self) -> int:
        """The next example's index, which counts as taken."""
        index = self.peek()
        self.taken += 1
        return index


@functools.lru_cache(maxsize=8)
def _shuffled(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
