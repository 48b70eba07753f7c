"""Code for a few static row counts, chosen by a tile's rows."""

from __future__ import annotations

import functools

from jax import lax


def for_height(heights, rows, action, step):
    """Runs action(height, step) of the lowest height that holds the rows."""
    chosen = functools.partial(action, heights[-1])
    for height in reversed(heights[:-1]):
        lower = functools.partial(action, height)
        chosen = functools.partial(lax.cond, rows <= height, lower, chosen)
    return chosen(step)
