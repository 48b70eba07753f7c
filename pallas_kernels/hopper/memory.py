"""Shared memory that the copy engine and the tensor cores see in two ways.

A copy's box of rows, 128 bytes (or less) wide, may start at any row of an array. The tensor cores
want tiles of 8 rows. In memory both are the same bytes, so each stage has two views.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def two_views(shape, dtype, *, load_shape=None):
    """[what copies write, what the tensor cores read] of one memory; the last axis is a swizzle."""
    width = shape[-1]
    swizzle = plgpu.SwizzleTransform(2 * width)
    tiling = plgpu.TilingTransform((8, width))
    load = plgpu.SMEM(load_shape or shape, dtype, transforms=(swizzle,))
    return [load, plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))]


def overlaid(*uses, interpreted: bool):
    """One memory for several uses that follow each other, each a list of views.

    The interpreter has no layouts and lays nothing over anything: there each use is one plain
    reference.
    """
    if interpreted:
        return tuple(plgpu.SMEM(use[-1].shape, use[-1].dtype) for use in uses)
    return plgpu.RefUnion(*(view for use in uses for view in use))


def views_of(reference, *counts: int, interpreted: bool):
    """The views of each use of an `overlaid` memory, in a kernel; `counts` are their numbers."""
    if interpreted:
        return [(use,) * count for use, count in zip(reference, counts, strict=True)]
    views = iter(reference)
    return [tuple(next(views) for _ in range(count)) for count in counts]


def from_first(size: int, number):
    """The first `size` of an axis that may be shorter: copies bring zeros for what is not there.

    What is known before the kernel runs JAX 0.12 compares with the axis, and refuses.

    Args:
      number: any that is known when it runs only.
    """
    return pl.ds(0 * number, size)


def drain(empty, uses, length: int):
    """Waits for the last uses of a ring to end: no phase of its barriers may stay unseen."""
    lax.fori_loop(
        jnp.maximum(uses - length, 0),
        uses,
        lambda use, _: plgpu.barrier_wait(empty.at[lax.rem(use, jnp.int32(length))]),
        None,
    )
