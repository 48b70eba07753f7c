"""Tokens to rows, with a gradient that only reads: a scatter would add in any order."""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.routing_plan.api import combine


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def dispatch(backend: ModuleType, groups: int, slots: int, x, group, token_slots, valid):
    """The route of all (token, choice) rows, and the x of each in its order.

    Args:
      x: [T, H]. group: int32 [T, choices]; no group works on rows of another number.
      token_slots: int32 [T], -1 for none. valid: bool [T], False: no group works on the token.
    """
    return backend.dispatch(x, groups, slots, group, token_slots, valid)


def _forward(backend, groups, slots, x, group, token_slots, valid):
    route, rows = backend.dispatch(x, groups, slots, group, token_slots, valid)
    return (route, rows), route.position


def _backward(backend, groups, slots, position, gradients):
    _, drows = gradients
    ones = jnp.ones(position.shape, jnp.promote_types(jnp.float32, drows.dtype))
    return combine(drows, position, ones).astype(drows.dtype), None, None, None


dispatch.defvjp(_forward, _backward)
