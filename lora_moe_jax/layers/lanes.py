"""What a TPU holds in rows of 128: narrower arrays take the memory of as many, and XLA may lay them
out the other way around, and copy them for every kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import platform_implementation

LANES = 128


def whole_lanes(columns: int) -> int:
    """So many columns on a TPU, that is: up to the next whole lanes. Elsewhere as they are."""
    if platform_implementation() != "mosaic_tpu":
        return columns
    return -(-columns // LANES) * LANES


def filled_up(x: jax.Array, columns: int) -> jax.Array:
    """With zeros up to so many columns."""
    missing = columns - x.shape[-1]
    return jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, missing))) if missing else x
