"""One small engine for each golden model, shared by all tests, and handed back as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_moe_jax import Engine
from lora_moe_jax.pocket import BASE
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import TIGHT

OPTIONS = {
    "dtype": "float32",
    "max_adapters": 8,
    "max_rank": 16,
    "max_length": 128,
    "max_requests": 8,
    "token_buckets": (8, 96),
}


@dataclass(frozen=True)
class Golden:
    """What the reference computed: input_ids [B, S] and float32 logits [B, S, V]."""

    input_ids: np.ndarray
    logits: dict[str, np.ndarray]
    mixed_adapters: list[str | None]
    mixed_logits: np.ndarray


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    def load(family: str) -> Golden:
        tensors = load_file(GOLDEN / family / "golden.safetensors")
        names = ("attn", "rslora", "experts")
        return Golden(
            tensors["input_ids"],
            {key[7:]: value for key, value in tensors.items() if key.startswith("logits.")},
            [None if i < 0 else names[i] for i in tensors["mixed.adapter_index"]],
            tensors["mixed.logits"],
        )

    return load


@pytest.fixture(scope="session")
def tight() -> Engine:
    """The pocket model's, short of everything; empty before and after."""
    return Engine.from_pretrained(BASE, **TIGHT)


@pytest.fixture(scope="session")
def engines() -> dict[tuple, Engine]:
    return {}


@pytest.fixture
def engine(engines) -> Callable[..., Engine]:
    """`engine(family)`; after the test it must be idle, and its adapters are unloaded.

    Tests that want the prefix cache turn it on: the others compute every token.
    """
    used: dict[tuple, Engine] = {}

    def get(family: str, **changed) -> Engine:
        key = family, *changed.items()
        used[key] = shared(engines, family, **changed)
        return used[key]

    yield get
    for one in used.values():
        hand_back(one)


def shared(engines: dict[tuple, Engine], family: str, **changed) -> Engine:
    """The one of these options, made where there is none yet."""
    key = family, *changed.items()
    if key not in engines:
        options = OPTIONS | changed
        engines[key] = Engine.from_pretrained(GOLDEN / family / "base", **options)
    engines[key]._runner.scheduler.prefix_cache = False
    return engines[key]


def hand_back(one: Engine) -> None:
    one._runner.scheduler.prefill_chunk = one.options.prefill_chunk
    stats = one.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_pages == stats.total_pages
    pool = one._runner.scheduler.pool
    pool.give_back(pool.take(pool.free))  # whatever the prefix cache has kept
    for info in one.adapters():
        one.unload_adapter(info.name)
