"""An adapter that is there already as one in training: its sizes, and its values as masters."""

from __future__ import annotations

import functools

import numpy as np

from lora_moe_jax.adapters import Adapter
from lora_moe_jax.adapters.bank import Bank
from lora_moe_jax.errors import AdapterError
from lora_moe_jax.training.masters import Master, Masters, Stacks, within_ranks
from lora_moe_jax.training.pair_shape import PairShape


def adapter_shapes(adapter: Adapter, bank: Bank) -> dict[str, PairShape]:
    """The pairs of an adapter that fits the bank, by projection name.

    Raises:
      AdapterError: it has none, or experts of several ranks that share a factor in the bank.
    """
    pairs = {name: adapter.pairs[name] for name in bank.projections if name in adapter.pairs}
    found = {
        name: PairShape.of(name, pair.ranks, pair.scaling, bank)
        for name, pair in pairs.items()
        if pair.ranks.any()
    }
    if not found:
        raise AdapterError("the adapter is empty", expected="one pair of factors at least")
    return found


def adapter_masters(adapter: Adapter, stacks: Stacks) -> Masters:
    """Its values on the host. Where the bank has a factor for each expert, a shared one becomes
    as many."""
    return stacks.join(functools.partial(_values, adapter, stacks))


def _values(adapter: Adapter, stacks: Stacks, name: str) -> Master:
    pair, shape = adapter.pairs[name], stacks.shapes[name]
    rank = shape.a[1]
    factors = (factor[:, :rank].astype(np.float32) for factor in (pair.a, pair.b))
    return Master(*(within_ranks(factor, shape.ranks) for factor in factors))
