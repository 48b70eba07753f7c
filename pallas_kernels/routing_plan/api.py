"""The routing plan: one sort per MoE layer, shared by every grouped product of the layer.

A *row* is one (token, choice) pair. Sorted by (expert, slot), rows of one expert are contiguous
for the base product and rows of one (expert, slot) bucket are contiguous inside them for LoRA.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.row_reduce.api import row_dot

FEW_ROWS = 2048  # up to here, off the CPU, rows are counted instead of sorted


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

    Raises:
      ValueError: shapes that do not belong together, or experts that are no integers.
    """
    if experts.ndim != 2 or experts.shape[1] == 0:
        raise ValueError(
            f"experts must be [tokens, choices], with a choice at least, got {experts.shape}"
        )
    experts = expert_ids(experts)
    check_tokens(experts.shape[0], token_slots, valid)
    group = local_groups(experts, num_groups, first_group, valid)
    tokens, choices = group.shape
    slots = jnp.repeat(token_slots.astype(jnp.int32), choices)
    few = group.size <= FEW_ROWS and jax.default_backend() != "cpu"
    order, position = (_order_by_counting if few else _order_by_sorting)(group.reshape(-1), slots)
    group_sizes = jnp.sum(group.reshape(-1, 1) == jnp.arange(num_groups), axis=0, dtype=jnp.int32)
    return RoutingPlan(
        token=lax.div(order, jnp.int32(choices)),
        position=position.reshape(tokens, choices),
        row_slots=slots[order],
        group_sizes=group_sizes,
    )


def expert_ids(experts) -> Int[Array, "tokens choices"]:
    """In 32 bits, as the number of groups need not fit into narrower ones; raises ValueError."""
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(f"experts must be integers, got {experts.dtype}")
    return jnp.asarray(experts, jnp.int32)


def check_tokens(count: int, token_slots, valid) -> None:
    """Raises ValueError unless there is a slot, and if there is any a `valid`, for each token."""
    arrays = dict(token_slots=token_slots) | ({} if valid is None else dict(valid=valid))
    for name, array in arrays.items():
        if np.shape(array) != (count,):
            shape = np.shape(array)
            raise ValueError(f"{name} must be [{count}], one for each token, got {shape}")
        kind = jnp.bool if name == "valid" else jnp.integer
        if not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f"{name} must be of type {kind.__name__}, got {array.dtype}")


def local_groups(
    experts: Int[Array, "tokens choices"],
    num_groups: int,
    first_group: int | Int[Array, ""] = 0,
    valid: Array | None = None,
) -> Int[Array, "tokens choices"]:
    """The local group of each (token, choice); `num_groups` where no local expert works on it."""
    local = experts - first_group
    inside = (local >= 0) & (local < num_groups)
    if valid is not None:
        inside &= valid[:, None]
    return jnp.where(inside, local, num_groups).astype(jnp.int32)


def _order_by_sorting(group, slots):
    """The row at each place, in order of (group, slot, row), and each row's place."""
    row = jnp.arange(group.shape[0], dtype=jnp.int32)
    _, _, order = lax.sort((group, slots, row), num_keys=2, is_stable=True)
    return order, _inverse(order)


def _order_by_counting(group, slots):
    """The same by comparing all pairs: two fused reductions, which a sort's launches outlast."""
    row = jnp.arange(group.shape[0], dtype=jnp.int32)

    def before(mine, other, tie):
        return (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & tie)

    is_before = before(group, group, before(slots, slots, row[None, :] < row[:, None]))
    position = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    here = position[None, :] == row[:, None]
    return jnp.sum(jnp.where(here, row, 0), axis=1, dtype=jnp.int32), position


def _inverse(order):
    """The place of each element of a permutation."""
    place = jnp.arange(order.size, dtype=jnp.int32)
    return jnp.zeros_like(place).at[order].set(place, unique_indices=True)


def combine(
    rows: Float[Array, "rows width"],
    position: Int[Array, "tokens choices"],
    weights: Float[Array, "tokens choices"],
) -> Float[Array, "tokens width"]:
    """Weighted sum of each token's rows over its choices, in choice order, in float32.

    Rows past the last group count as zero (`grouped_lora_matmul` writes them so). Every row is that
    of one choice, so the gradients of rows and weights only read: a scatter would add in any order.

    Args:
      position: each choice's row, a permutation.

    Raises:
      ValueError: not a weight, or not a row, for each choice.
    """
    if position.ndim != 2 or weights.shape != position.shape:
        raise ValueError(
            "position and weights must both be [tokens, choices], "
            f"got {position.shape} and {weights.shape}"
        )
    if rows.ndim != 2 or rows.shape[0] != position.size:
        raise ValueError(f"rows must be [{position.size}, width], got {rows.shape}")
    return _combine(rows, position, weights)


@jax.custom_vjp
def _combine(rows, position, weights):
    return _sum_of_choices(rows, position, weights)


def _combine_forward(rows, position, weights):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    rows, position, weights = jax.tree.map(jnp.asarray, (rows, position, weights))
    return _sum_of_choices(rows, position, weights), (rows, position, weights)


def _combine_backward(saved, dy):
    rows, position, weights = saved
    token, of_row = rows_of_choices(position, weights)
    drows = dy[token] * of_row[:, None].astype(dy.dtype)
    dweights = [row_dot(dy, rows[position[:, choice]]) for choice in range(position.shape[1])]
    return drows.astype(rows.dtype), None, jnp.concatenate(dweights, axis=1).astype(weights.dtype)


_combine.defvjp(_combine_forward, _combine_backward)


def rows_of_choices(
    position: Int[Array, "tokens choices"], weights: Float[Array, "tokens choices"]
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """The token and the weight of each row."""
    order = _inverse(position.reshape(-1))
    return lax.div(order, jnp.int32(position.shape[1])), jnp.asarray(weights).reshape(-1)[order]


def _sum_of_choices(rows, position, weights):
    dtype = jnp.promote_types(jnp.float32, rows.dtype)
    products = [
        rows[position[:, choice]].astype(dtype) * weights[:, choice, None].astype(dtype)
        for choice in range(position.shape[1])
    ]
    if jax.default_backend() == "cpu":
        # Finished products, so that no addition is fused with one of its two: which one the
        # compiler takes would decide the rounding. Elsewhere one loop adds them all, the same way
        # for every token.
        products = lax.optimization_barrier(products)
    return functools.reduce(operator.add, products)
