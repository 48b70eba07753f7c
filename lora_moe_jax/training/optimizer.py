"""The optimizer of one adapter: its own moments, step count and settings.

Each adapter is stepped by itself, by one function that is compiled for adapters of its shapes: no
bit of another one is read or written.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lora_moe_jax.adapters.bank import Place
from lora_moe_jax.training.masters import Master, Masters


class StepSettings(NamedTuple):
    """What one step is taken with; numbers that nothing is compiled for.

    Attributes:
      clip_norm: the gradient is scaled down to this norm; infinity for none.
    """

    learning_rate: float
    weight_decay: float
    clip_norm: float


class Stepped(NamedTuple):
    """An adapter after a step; what it was before where the step was refused.

    Attributes:
      good: whether gradient and new values (in the bank's dtype, too) are finite.
      norm: of the gradient over all its parameters, before it was clipped.
    """

    masters: Masters
    state: optax.OptState
    good: jax.Array
    norm: jax.Array


class Optimizer:
    """Clips, scales by `scaling` (Adam), decays weights, and takes the step.

    Args:
      scaling: an optax transformation as `optax.scale_by_adam()`, without a learning rate.
      bank_dtype: that of the slots, into which the new values must fit.
    """

    def __init__(self, scaling: optax.GradientTransformation, bank_dtype):
        self.init = jax.jit(scaling.init)
        step = functools.partial(_step, scaling, bank_dtype)
        self.step = jax.jit(step, donate_argnums=(0, 1))


def _step(scaling, bank_dtype, masters: Masters, state, gradients: Masters, settings: StepSettings):
    norm = optax.tree.norm(gradients)
    clip = jnp.minimum(1.0, settings.clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))

    def moved(masters: Masters, state, gradients: Masters):
        clipped = jax.tree.map(lambda gradient: gradient * clip, gradients)
        updates, new_state = scaling.update(clipped, state, masters)

        def move(master, update):
            return master - settings.learning_rate * (update + settings.weight_decay * master)

        return jax.tree.map(move, masters, updates), new_state

    new_masters, _ = moved(masters, state, gradients)
    finite = [jnp.isfinite(x.astype(bank_dtype)).all() for x in jax.tree.leaves(new_masters)]
    good = jnp.isfinite(norm) & jnp.stack(finite).all()
    # Computed once more, or the new masters are kept beside the old ones until all are known.
    before, gradients, good = lax.optimization_barrier(((masters, state), gradients, good))
    after = moved(*before, gradients)
    kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)
    return Stepped(*kept, good, norm)


def with_gradients(
    totals: Masters,
    gradients: Mapping[str, dict[str, jax.Array]],
    places: Mapping[str, Place],
    slot: np.int32,
    *,
    first: bool,
) -> Masters:
    """Sums so far plus one slot's gradients of some projections; the former are donated.

    Args:
      gradients: of all copies of a rank class's slots, by projection and factor.
      slot: the number of the copy.
      first: whether these projections have no sums so far, see `unset`.
    """
    stacks = {place.stack: totals[place.stack] for place in map(places.get, gradients)}
    where = [places[name] for name in gradients]
    order = tuple(place.stack for place in where)
    indices = np.int32([place.index for place in where])
    return totals | _with_gradients((order, first), stacks, [*gradients.values()], indices, slot)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _with_gradients(kind, totals: Masters, gradients: list[dict[str, jax.Array]], indices, slot):
    """Without names: layers that are alike share a compiled function."""
    (order, first), totals = kind, dict(totals)
    place = _set_at if first else _add_at
    for i, (stack, factors) in enumerate(zip(order, gradients, strict=True)):
        own = {key: x[slot].astype(jnp.float32) for key, x in factors.items()}
        totals[stack] = jax.tree.map(
            functools.partial(place, indices[i]), totals[stack], _as_master(own, totals[stack])
        )
    return totals


def _set_at(index: jax.Array, total: jax.Array, part: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(total, part, index, 0)


def _add_at(index: jax.Array, total: jax.Array, part: jax.Array) -> jax.Array:
    one = lax.dynamic_index_in_dim(total, index, keepdims=False) + part
    return lax.dynamic_update_index_in_dim(total, one, index, 0)


def _as_master(factors: Mapping[str, jax.Array], stack: Master) -> Master:
    """A slot's factors at the adapter's own rank; kv_b's B, by head and in halves, in one."""
    rank = stack.a.shape[2]
    own = {name: factor[:, :rank] for name, factor in factors.items()}
    if "b" in own:
        return Master(own["a"], own["b"])
    by_head = jnp.concatenate([own["b_key"], own["b_value"]], axis=2)
    return Master(own["a"], by_head.swapaxes(0, 1).reshape(stack.b.shape[1:]))


@jax.jit
def unset(masters: Masters) -> Masters:
    """Where gradients are summed: any values, which the first of each projection replace."""
    return jax.tree.map(lambda x: lax.empty(x.shape, x.dtype), masters)


@functools.partial(jax.jit, donate_argnums=0)
def sums(total: Masters, gradients: Masters) -> Masters:
    """Gradients so far plus more of them; the former are donated."""
    return jax.tree.map(jnp.add, total, gradients)
