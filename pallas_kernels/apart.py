"""Values that are compiled apart from what they are used in."""

from __future__ import annotations

import jax
from jax import lax


def apart(value):
    """The value, made before what uses it where both together would have other bits.

    XLA for CPUs has bits of exp(x - y), or of x + y * z, that depend on the shape of the loop they
    are compiled into, and so on how many rows there are: 0.12 of any number, versions before of
    many (704 rows of 3 experts are, 300 are not).
    """
    return lax.optimization_barrier(value) if jax.default_backend() == "cpu" else value
