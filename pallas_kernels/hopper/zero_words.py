"""Words in global memory for a kernel's programs to count in."""

from __future__ import annotations

import jax.numpy as jnp


def zeros_to_count(numbers, size: int):
    """int32 [size], zeros: whoever counts in them leaves zeros, as to XLA they are only read.

    Args:
      numbers: any that are not as low as -2³⁰.
    """
    # What the compiler knows to be zero might be anybody's.
    return jnp.full(size, (jnp.min(numbers) < -(2**30)).astype(jnp.int32))
