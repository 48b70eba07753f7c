"""Tokens to rows, with a gradient that only reads: a scatter would add in any order."""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_lora_matmul.lora import terms_of_parts
from pallas_kernels.once import Once
from pallas_kernels.routing_plan.api import combine


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def dispatch(backend: ModuleType, groups: int, slots: int, x, group, token_slots, valid, lora):
    """The route of all (token, choice) rows, the x of each in its order, and perhaps u of it.

    Args:
      x: [T, H]. group: int32 [T, choices]; no group works on rows of another number.
      token_slots: int32 [T], -1 for none. valid: bool [T], False: no group works on the token.
      lora: adapters of gate and up, for u. Its gradient is that of the product that u goes into.

    Returns:
      The route, rows, and `Once` u of all terms, or None where laying rows out does not make it.
    """
    terms = terms_of_parts((0,) * len(lora), lora)
    route, rows, u = backend.dispatch(x, groups, slots, group, token_slots, valid, terms)
    return route, rows, u and Once.of(u)


def _forward(backend, groups, slots, *arguments):
    found = dispatch(backend, groups, slots, *arguments)
    route, *_ = found
    return found, route.position


def _backward(backend, groups, slots, position, gradients):
    _, drows, _ = gradients
    ones = jnp.ones(position.shape, jnp.promote_types(jnp.float32, drows.dtype))
    return combine(drows, position, ones).astype(drows.dtype), None, None, None, None


dispatch.defvjp(_forward, _backward)
