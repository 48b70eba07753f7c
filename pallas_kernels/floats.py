"""Arrays that have to be of floating-point numbers."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp


def check_floats(arrays: Mapping[str, jax.Array]) -> None:
    """Raises ValueError, with its name, for an array of other numbers."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be a floating-point array, got {array.dtype}")
