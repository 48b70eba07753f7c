"""One engine and one trainer for each golden model, shared by all tests, and left empty."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from lora_moe_jax import Engine
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import random_model
from lora_moe_jax.serving.options import EngineOptions
from lora_moe_jax.training import Trainer
from tests.adapters.tables import GOLDEN
from tests.bench.test_serving import small_config

ENGINE = {
    "max_adapters": 4,
    "max_rank": 4,
    "max_length": 96,
    "max_requests": 4,
    "token_buckets": (64,),
    "max_logprobs": 0,
}
SMALL = {"max_adapters": 8, "page_size": 16}
BUCKETS = (192,)  # one, as most of the time goes into compiling


@pytest.fixture(scope="session")
def trainers() -> dict[tuple[str, str, bool], tuple[Engine, Trainer]]:
    return {}


@pytest.fixture(scope="session")
def small_pair(tmp_path_factory) -> tuple[Engine, Trainer]:
    """Of a model of one layer, with slots for more adapters than a pack has copies of."""
    config = small_config(tmp_path_factory.mktemp("small"))
    options = EngineOptions.resolve(
        config, dtype="float32", **ENGINE | SMALL, prefill_chunk=None, decode_steps=1
    )
    slots = SlotConfig(SMALL["max_adapters"], ENGINE["max_rank"], "float32")
    model = random_model(config, dtype="float32", adapters=slots)
    engine = Engine.from_model(model, None, options)
    return engine, Trainer(engine, token_buckets=BUCKETS, progress=True)


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Sends it; also where the tests run in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def pair(trainers) -> Callable[..., tuple[Engine, Trainer]]:
    """`pair(family)`: its engine and trainer; afterwards neither has an adapter."""
    used = []

    def get(
        family: str = "deepseek_v3", dtype: str = "float32", shared_outer: bool = False
    ) -> tuple[Engine, Trainer]:
        key = family, dtype, shared_outer
        if key not in trainers:
            base, options = GOLDEN / family / "base", {"shared_outer": shared_outer, **ENGINE}
            engine = Engine.from_pretrained(base, dtype=dtype, **options)
            trainers[key] = engine, Trainer(engine, token_buckets=BUCKETS)
        used.append(key)
        return trainers[key]

    yield get
    for key in used:
        engine, trainer = trainers[key]
        for info in trainer.adapters():
            trainer.remove_adapter(info.name)
        for info in engine.adapters():
            engine.unload_adapter(info.name)
