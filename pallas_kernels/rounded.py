"""Rounding that the compiler keeps.

XLA for GPUs takes a conversion to a narrower type and back for nothing, as if more precision could
not hurt: then a row's bits depend on what its value is used for, and on what is between.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rounded(values: jax.Array, dtype) -> jax.Array:
    """The values in another type, rounded to it whoever widens them again."""
    if jnp.dtype(dtype) == jnp.bfloat16 != values.dtype:
        number = jnp.finfo(jnp.bfloat16)
        values = lax.reduce_precision(values, number.nexp, number.nmant)
    return values.astype(dtype)


def added(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y of one type, rounded to it."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return rounded(x.astype(wide) + y.astype(wide), x.dtype)
