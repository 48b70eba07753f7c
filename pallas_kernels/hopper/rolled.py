"""Loops that stay loops.

The compiler writes all turns of a short loop out. In a loop around it, that is faster; but code
that runs once takes as long as it is long, as in a model other kernels and weights have driven it
out of the caches since the last time (NOTES.md, "Code that is cold").
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def unknown(value: int, number):
    """The value, which the compiler cannot know, with any number from 0 to 2³⁰."""
    return value + lax.shift_right_logical(number, jnp.int32(30))


def rolled(first: int, end: int, number, do: Callable[[jax.Array], None]) -> None:
    """do(i) for each i from the first to the one before the end; `number` as in `unknown`."""
    lax.fori_loop(first, unknown(end, number), lambda i, _: do(i), None)
