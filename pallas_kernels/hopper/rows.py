"""A row of an array in the registers of a warpgroup, from global memory and back."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # a row's width is a multiple of them
WIDEST_LOAD = 16  # bytes


def layout_of_row(width: int, dtype):
    """Over the threads, in vectors as wide as a load of whole rows of threads allows."""
    size = WIDEST_LOAD // jnp.dtype(dtype).itemsize
    while width % (THREADS * size):
        size //= 2
    return plgpu.Layout.WG_STRIDED((width,), vec_size=size)
