"""The trainer's logprobs are the engine's, bit for bit, before and after steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lora_moe_jax.training import LoraConfig
from tests.training.helpers import add, data, same, scores

LENGTHS = [2, 33, 7, 20, 65, 12]


@pytest.mark.parametrize(
    "family, dtype",
    [
        ("deepseek_v3", "float32"),  # whose trainer other tests have, too
        pytest.param("gpt_oss", "float32", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "float32", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "bfloat16", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_logprobs_are_those_of_serving(pair, family, dtype):
    engine, trainer = pair(family, dtype)
    for i, name in enumerate("abc"):
        add(trainer, engine, name, seed=i, rank=2 if name == "b" else 4)
    batch = data(list(zip(itertools.cycle("abc"), LENGTHS, strict=False)))
    for turn in range(2):
        expected = scores(engine, batch)
        assert same(trainer.forward_backward(batch).logprobs, expected)
        assert same(trainer.forward_backward(batch[::-1]).logprobs[::-1], expected)
        for datum, logprobs in list(zip(batch, expected, strict=True))[turn::3]:
            assert same(trainer.forward_backward([datum]).logprobs, [logprobs])
        before = {info.name: info.version for info in engine.adapters()}
        reports = trainer.optim_step(["a", "c"], 0.01)
        now = {info.name: info.version for info in engine.adapters()}
        assert now == {"a": before["a"] + 1, "b": before["b"], "c": before["c"] + 1}
        assert {name: report.version for name, report in reports.items()} == {
            "a": now["a"],
            "c": now["c"],
        }
        changed = scores(engine, batch)
        assert [np.array_equal(x, y) for x, y in zip(expected, changed, strict=True)] == [
            datum.adapter == "b" for datum in batch
        ]
        trainer.forward_backward(batch)  # gradients of the first two steps are still b's
    assert same(trainer.forward_backward(batch).logprobs, changed)


def test_the_prefix_cache_and_eviction_change_nothing(pair):
    engine, trainer = pair()
    add(trainer, engine, "a")
    batch = data([("a", 60), ("a", 40)])
    expected = trainer.forward_backward(batch).logprobs
    assert same(scores(engine, batch), expected) and same(scores(engine, batch), expected)
    for i in range(4):  # they take every slot
        trainer.add_adapter(f"other{i}", LoraConfig(rank=1))
        trainer.forward_backward(data([(f"other{i}", 5)]))
    assert next(info for info in engine.adapters() if info.name == "a").slot is None
    assert same(trainer.forward_backward(batch).logprobs, expected)
    trainer.optim_step("a", 0.01)
    assert same(scores(engine, batch), trainer.forward_backward(batch).logprobs)


def test_nothing_compiles_for_another_adapter_or_mix(pair):
    """All lengths are one of a loss's powers of two, for each of which it is compiled."""
    engine, trainer = pair()
    for i, name in enumerate("ab"):
        add(trainer, engine, name, seed=i)
    trainer.forward_backward(data([("a", 20), ("b", 30)]))
    trainer.forward_backward(data([("a", 20), ("b", 30)]))
    trainer.optim_step(["a", "b"], 0.01)
    compilations = engine.stats().compilations
    add(trainer, engine, "c", seed=9)
    for step in range(3):
        trainer.forward_backward(data([("c", 22), ("a", 31), ("b", 19)], seed=step))
        trainer.forward_backward(data([("b", 24)], seed=step))
        trainer.optim_step(["a", "b", "c"], 0.1 / (step + 1), weight_decay=0.1, clip_norm=1.0)
    assert engine.stats().compilations == compilations
