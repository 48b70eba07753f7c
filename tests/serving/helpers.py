"""Requests as the tests make them, and comparison of what comes out bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import jax
import numpy as np

from lora_moe_jax import Completion, Engine, SamplingParams
from lora_moe_jax.adapters import Adapter, AdapterConfig, LoraPair
from lora_moe_jax.serving.scheduler import Scheduler
from lora_moe_jax.serving.step_batch import StepBatch
from lora_moe_jax.serving.step_layout import StepInputs, StepLayout, advanced
from tests.adapters.tables import GOLDEN

ADAPTERS = ("attn", "rslora", "experts")
# For the pocket model: an engine that is short of slots, rows and pages, and compiles little.
TIGHT = {
    "dtype": "float32",
    "max_adapters": 2,
    "max_rank": 16,
    "max_requests": 3,
    "max_length": 72,
    "page_size": 8,
    "token_buckets": (16,),
    "cache_tokens": 72,
    "max_logprobs": 0,
}


def greedy(max_tokens: int = 8, **settings) -> SamplingParams:
    settings = {"temperature": 0.0, "ignore_eos": True, "logprobs": True} | settings
    return SamplingParams(max_tokens=max_tokens, **settings)


def sampled(seed: int, max_tokens: int = 8, **settings) -> SamplingParams:
    return greedy(max_tokens, **{"temperature": 1.0, "seed": seed} | settings)


def with_options(engine: Engine, **options) -> Engine:
    """An engine on another's compiled steps, cache and bank, for options that change none of these.

    What the other has in them is written over.
    """
    changed = dataclasses.replace(engine.options, **options)
    return Engine(engine.arrays, engine.config, engine.codec, engine._runner.steps, changed)


def load_golden(engine: Engine, family: str, names: Sequence[str] = ADAPTERS) -> None:
    for name in names:
        engine.load_adapter(name, GOLDEN / family / "adapters" / name)


def prompts(lengths: Sequence[int], seed: int = 0, vocab: int = 256) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, length).tolist() for length in lengths]


def bits(completion: Completion) -> tuple:
    """Tokens and the bits of their logprobs."""
    return tuple(completion.token_ids), np.float32(completion.logprobs).tobytes()


_given: WeakKeyDictionary[Scheduler, tuple[StepBatch, StepInputs]] = WeakKeyDictionary()


def unpacked(scheduler: Scheduler, batch: StepBatch) -> StepInputs:
    """A step as the device sees it, who sees every step."""
    last, inputs = _given.get(scheduler, (None, None))
    if batch is last:
        return inputs
    if batch.packed is None:
        assert (batch.size, batch.steps, last.steps) == (last.size, 1, 1)
        inputs = jax.tree.map(np.asarray, advanced(inputs))
    else:
        inputs = StepLayout(*scheduler.page_tables.shape).unpack(batch.packed)
    _given[scheduler] = batch, inputs
    return inputs


def probe(engine: Engine, adapter: str | None = None) -> bytes:
    """Logits of a fixed sequence: what must not change when a bad thing was refused."""
    return engine.score(prompts([40], seed=9), [adapter], return_logits=True)[0].logits.tobytes()


def constant_adapter(engine: Engine, value: float, rank: int = 16) -> Adapter:
    """An adapter whose every number, in every projection that has slots, is `value`."""
    pairs = {}
    for name, projection in engine.bank.projections.items():
        groups = projection.groups
        pairs[name] = LoraPair(
            a=np.full((groups, rank, projection.in_features), value, np.float32),
            b=np.full((groups, rank, projection.out_features), value, np.float32),
            scaling=np.full(groups, value, np.float32),
            ranks=np.full(groups, rank, np.int32),
        )
    return Adapter(pairs, "stacked", AdapterConfig(r=rank, target_modules=("q_proj",)))


def no_read(slot: int, held) -> Adapter:
    """What a pool reads slots with where nothing comes from a device."""
    raise AssertionError("nothing came from a device")
