"""Code that is there when what it works on comes.

A kernel that begins while the one before it ends (`dependent_launch.py`) has nothing to do until
then, and its code is not there: in a model, weights have driven it out of the caches, and straight
code takes longer to come than to run (NOTES.md, "Code that is cold"). So a loop begins with a turn
-1 that has zeros in place of what is waited for, and stores nothing. A kernel that does not begin
early has no such turn: it would be late by it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.rolled import rolled


def rehearsed(early: bool, turns: int, number, do: Callable) -> None:
    """do(turn, is_real) for -1, and then for each of the turns; `number` as in `rolled.unknown`.

    `is_real` is True if there is no rehearsal.
    """
    if early:
        rolled(-1, turns, number, lambda turn: do(turn, turn >= 0))
    else:
        for turn in range(turns):
            do(turn, True)


def if_real(is_real, make: Callable, like):
    """make(), or zeros in its place, like some arrays of the same layouts."""
    if is_real is True:
        return make()
    return lax.cond(is_real, make, lambda: jax.tree.map(jnp.zeros_like, like))
