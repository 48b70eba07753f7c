"""Tokens to rows and back, with gradients that only read: a scatter would add in any order."""

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
    return gather(x, token), (token, position)


def _spread_backward(gather, saved, dy):
    _, position = saved
    ones = jnp.ones(position.shape, jnp.promote_types(jnp.float32, dy.dtype))
    return combine(dy, position, ones).astype(dy.dtype), None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def weighted_sum(rows, weights, token, position):
    """`combine`: each token's rows times their weights, summed in the order of the choices."""
    return combine(rows, position, weights)


def _weighted_sum_forward(rows, weights, token, position):
    return combine(rows, position, weights), (rows, weights, token, position)


def _weighted_sum_backward(saved, dy):
    rows, weights, token, position = saved
    choices = position.shape[1]
    weight_of_row = jnp.zeros(rows.shape[0], weights.dtype)
    weight_of_row = weight_of_row.at[position.reshape(-1)].set(
        weights.reshape(-1), unique_indices=True
    )
    drows = dy[token] * weight_of_row[:, None].astype(dy.dtype)
    dweights = jnp.stack(
        [
            jnp.sum(dy * rows[position[:, choice]].astype(dy.dtype), axis=1)
            for choice in range(choices)
        ],
        axis=1,
    )
    return drows.astype(rows.dtype), dweights.astype(weights.dtype), None, None


weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)
