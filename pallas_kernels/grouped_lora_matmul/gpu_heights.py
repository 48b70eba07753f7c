"""Code for a few static row counts, chosen by a tile's rows."""

from __future__ import annotations

import functools

from jax import lax


def for_height(heights, rows, action, step):
    """Runs action(height, step) of the lowest height that holds the rows.

    Mosaic lowers what a condition does where it does not hold twice, the first time to see types.
    So other conditions are where it holds: each height's code would be lowered twice as often as
    that of the one before.
    """
    chosen = functools.partial(action, heights[-1])
    for height in reversed(heights[:-1]):
        lower = functools.partial(action, height)
        chosen = functools.partial(lax.cond, rows > height, chosen, lower)
    return chosen(step)
