"""Tokens to rows, with a gradient that only reads: a scatter would add in any order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.routing_plan.api import combine


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread(gather, x, token, position):
    """x[token]: the row of each (token, choice), in the order of the route.

    Args:
      gather: the backend's x[index].
      x: [T, H]. token: int32 [M]. position: int32 [T, choices], each choice's row.
    """
    return gather(x, token)


def _spread_forward(gather, x, token, position):
    return gather(x, token), position


def _spread_backward(gather, position, dy):
    ones = jnp.ones(position.shape, jnp.promote_types(jnp.float32, dy.dtype))
    return combine(dy, position, ones).astype(dy.dtype), None, None


spread.defvjp(_spread_forward, _spread_backward)
