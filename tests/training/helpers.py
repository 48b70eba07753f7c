"""Batches as the tests make them, and bits of what comes out."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from lora_moe_jax import Engine
from lora_moe_jax.training import Datum, LoraConfig, Trainer
from lora_moe_jax.training.masters import Master


def data(sizes: Sequence[tuple[str, int]], seed: int = 0, **fields) -> list[Datum]:
    """Sequences of (adapter, length)."""
    found = []
    for i, (adapter, length) in enumerate(sizes):
        rng = np.random.default_rng([seed, i, length])
        weights = rng.random(length - 1).astype(np.float32)
        tokens = rng.integers(2, 250, length).tolist()
        found.append(Datum(tokens, adapter, weights, **fields))
    return found


def every_module(engine: Engine) -> list[str]:
    """Names of all projections that have slots."""
    return list(engine.bank.projections)


def add(trainer: Trainer, engine: Engine, name: str, seed: int = 0, rank: int = 4) -> None:
    """An adapter on every projection whose B is not zero any more."""
    config = LoraConfig(rank=rank, alpha=8, target_modules=every_module(engine), seed=seed)
    trainer.add_adapter(name, config)
    trainer.forward_backward(data([(name, 20)], seed=100 + seed))
    trainer.optim_step(name, 0.03)


def scores(engine: Engine, batch: Sequence[Datum]) -> list[np.ndarray]:
    """What serving says of a batch."""
    found = engine.score([list(d.tokens) for d in batch], [d.adapter for d in batch])
    return [score.logprobs for score in found]


def same(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def arrays(tree: object) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def gradients(trainer: Trainer, name: str) -> list[np.ndarray]:
    """What has been summed for an adapter, which is forgotten."""
    training = trainer._adapters[name]
    found, training.gradients = arrays(training.gradients), None
    return found


def master(trainer: Trainer, name: str, projection: str) -> Master:
    """An adapter's factors of a projection."""
    training = trainer._adapters[name]
    return training.stacks.split(training.masters)[projection]


def state(trainer: Trainer, engine: Engine, name: str) -> list[np.ndarray]:
    """All that there is of an adapter: masters, moments, and its slot."""
    training = trainer._adapters[name]
    in_slot = slot_values(engine, slot_of(engine, name))
    return arrays((training.masters, training.moments, in_slot))


def slot_values(engine: Engine, slot: int) -> list[np.ndarray]:
    """What is in a slot, with zeros up to the bank's largest rank."""
    rank, place = engine.bank.locate(slot)
    own, found = engine.bank.classes[rank], []
    for name in sorted(own.places):
        for array in own.copy(name):
            value = np.asarray(array[place])
            more = engine.bank.max_rank - rank if value.ndim == 3 else 0
            found.append(np.pad(value, [(0, 0), (0, more), (0, 0)] if more else 0))
    return found


def slot_of(engine: Engine, name: str) -> int:
    return next(info.slot for info in engine.adapters() if info.name == name)
