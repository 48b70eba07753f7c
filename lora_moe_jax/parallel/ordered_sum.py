"""Sums over devices whose bits do not depend on where in the array an element is.

A communication library adds the shares of an element in an order that follows from the element's
place, as a ring begins elsewhere for each piece of the array: a token's bits would depend on the
batch around it. Here shares are moved, and each device adds some, in order of the devices.
"""

from __future__ import annotations

import functools
import math
import operator

import jax
from jax import lax
from jaxtyping import Array, Float

FEW_BYTES = 3 << 20  # that a device gets: up to here one exchange is faster than two of parts


def ordered_sum(x: Float[Array, "rows columns"], axes: tuple[str, ...]) -> jax.Array:
    """The sum over all devices along mesh axes, inside `shard_map`."""
    count = math.prod(map(lax.axis_size, axes))
    if count <= 2:
        return lax.psum(x, axes)  # of two, either order gives the same
    if (count - 1) * x.nbytes <= FEW_BYTES or x.shape[1] % count:
        return _sum(lax.all_gather(x, axes))
    mine = lax.all_to_all(x, axes, split_axis=1, concat_axis=0, tiled=True)
    return lax.all_gather(_sum(mine.reshape(count, x.shape[0], -1)), axes, axis=1, tiled=True)


def _sum(shares: Float[Array, "devices rows columns"]) -> jax.Array:
    """One after the other: a reduction's order would be the compiler's."""
    return functools.reduce(operator.add, shares)
