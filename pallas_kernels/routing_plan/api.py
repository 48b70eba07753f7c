"""The routing plan: one sort per MoE layer, shared by every grouped product of the layer.

A *row* is one (token, choice) pair. Sorted by (expert, slot), rows of one expert are contiguous
for the base product and rows of one (expert, slot) bucket are contiguous inside them for LoRA.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class RoutingPlan(NamedTuple):
    """Where rows go. Shapes depend on the number of tokens and choices only.

    Attributes:
      token: the token of each sorted row.
      position: the sorted position of each (token, choice).
      row_slots: the adapter slot of each sorted row, -1 for none.
      group_sizes: rows of each local expert; rows of other experts come after all of them.
    """

    token: Int[Array, " rows"]
    position: Int[Array, "tokens choices"]
    row_slots: Int[Array, " rows"]
    group_sizes: Int[Array, " groups"]


def routing_plan(
    experts: Int[Array, "tokens choices"],
    token_slots: Int[Array, " tokens"],
    num_groups: int,
    *,
    first_group: int | Int[Array, ""] = 0,
    valid: Array | None = None,
) -> RoutingPlan:
    """Sorts (token, choice) rows by (expert, slot), stably.

    Args:
      experts: chosen experts of each token.
      token_slots: adapter slot of each token, -1 for none.
      num_groups: how many experts are local.
      first_group: the first local expert, when experts are split over devices.
      valid: bool [tokens]; False for padding tokens, which go past the last group.
    """
    tokens, choices = experts.shape
    local = experts - first_group
    inside = (local >= 0) & (local < num_groups)
    if valid is not None:
        inside &= valid[:, None]
    group = jnp.where(inside, local, num_groups).reshape(-1).astype(jnp.int32)
    slots = jnp.repeat(token_slots.astype(jnp.int32), choices)
    row = jnp.arange(tokens * choices, dtype=jnp.int32)
    group, slots, order = lax.sort((group, slots, row), num_keys=2, is_stable=True)
    position = jnp.zeros_like(row).at[order].set(row, unique_indices=True)
    group_sizes = jnp.sum(group[:, None] == jnp.arange(num_groups), axis=0, dtype=jnp.int32)
    return RoutingPlan(
        token=order // choices,
        position=position.reshape(tokens, choices),
        row_slots=slots,
        group_sizes=group_sizes,
    )


def combine(
    rows: Float[Array, "rows width"],
    plan: RoutingPlan,
    weights: Float[Array, "tokens choices"],
) -> Float[Array, "tokens width"]:
    """Weighted sum of each token's rows over its choices, in choice order, in float32.

    Rows past the last group count as zero (`grouped_lora_matmul` writes them so).
    """
    dtype = jnp.promote_types(jnp.float32, rows.dtype)
    products = [
        rows[plan.position[:, choice]].astype(dtype) * weights[:, choice, None].astype(dtype)
        for choice in range(plan.position.shape[1])
    ]
    # Finished products, so that no addition is fused with one of its two: which one the compiler
    # takes would decide the rounding.
    return functools.reduce(operator.add, lax.optimization_barrier(products))
