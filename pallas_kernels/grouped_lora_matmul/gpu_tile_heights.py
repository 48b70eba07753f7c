"""Which heights tiles of large groups have: three, as each is code of its own, and with a fourth
the compiler puts products one after the other.

A group is cut into as few tiles as the tallest height allows, of equal rows, and a tile is
multiplied as the lowest height that holds them. So a group that is a little larger than the tallest
takes two tiles of half its rows each, for which a height of about the tallest is twice the work.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

UNIT = 8  # rows that products go in steps of
DEVIATIONS = 3  # of sizes of groups, to either side


@functools.cache
def likely_heights(mean: float, tallest: int, fixed: int, each: int) -> tuple[int, ...]:
    """The three heights with which tiles of a group take the least time, on average.

    Sizes of groups are taken to vary by the root of their mean, as where every row chooses its
    group by itself.

    Args:
      mean: rows of a group. tallest: the most rows of a tile, a multiple of 8.
      fixed, each: time of a tile, and of each of its rows, in the same unit.
    """
    spread = mean**0.5
    sizes = np.arange(max(1, int(mean - DEVIATIONS * spread)), int(mean + DEVIATIONS * spread) + 2)
    likely = np.exp(-0.5 * ((sizes - mean) / spread) ** 2)

    def time(heights: tuple[int, ...]) -> float:
        tiles = -(-sizes // heights[-1])
        rows = -(-sizes // tiles)
        height = np.take(heights, np.searchsorted(heights, rows))
        return float(likely @ (tiles * (fixed + each * height)))

    def preference(heights: tuple[int, ...]):
        # Of those that are as good the lowest tallest, whose stages are smaller, and others near
        # to it: for groups that are larger than any likely one.
        return time(heights), heights[-1], -heights[1], -heights[0]

    return min(itertools.combinations(range(UNIT, tallest + 1, UNIT), 3), key=preference)
