"""Values that are compiled apart from what they are used in."""

from __future__ import annotations

import jax
from jax import lax

# From JAX 0.12 on XLA for CPUs has bits of exp(x - y), or of x + y * z, that depend on the shape of
# the loop they are compiled into, and so on how many rows there are.
DEPENDS_ON_SHAPES = jax.__version_info__ >= (0, 12)


def apart(value):
    """The value, made before what uses it where both together would have other bits."""
    if DEPENDS_ON_SHAPES and jax.default_backend() == "cpu":
        return lax.optimization_barrier(value)
    return value
