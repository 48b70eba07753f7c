"""Nothing of one adapter in training reaches another: not a bit of loss, gradient, or state."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_jax.training import Trainer
from tests.serving.helpers import constant_adapter
from tests.training.helpers import add, data, gradients, same, slot_of, state

OWN = [("a", 33), ("a", 7), ("a", 40)]
OTHERS = [("b", 21), ("c", 65), ("b", 9)]


def mixed(own: list, others: list) -> list:
    """Sequences of others before, between and after."""
    return [others[0], own[0], others[1], own[1], own[2], others[2]]


def alone(trainer) -> tuple:
    result = trainer.forward_backward(data(OWN))
    return result.logprobs, result.losses["a"], gradients(trainer, "a")


def arrays_of(trainer, name):
    """The summed gradients, which stay."""
    training = trainer._adapters[name]
    kept = training.gradients
    found = gradients(trainer, name)
    training.gradients = kept
    return found


@pytest.mark.parametrize("loss", ["cross_entropy", "grpo"])
def test_others_in_the_batch_change_no_bit(pair, loss):
    engine, trainer = pair()
    for i, name in enumerate("abc"):
        add(trainer, engine, name, seed=i)
    inputs = {"inputs": {"old_logprobs": -5.0, "advantages": 0.7}}
    own, others = data(OWN, **inputs), data(OTHERS, seed=1, **inputs)
    expected = trainer.forward_backward(own, loss)
    bits = gradients(trainer, "a")
    assert any(part.any() for part in bits)
    result = trainer.forward_backward(mixed(own, others), loss)
    assert result.losses["a"] == expected.losses["a"]
    assert same([result.logprobs[i] for i in (1, 3, 4)], expected.logprobs)
    assert same(gradients(trainer, "a"), bits)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_adapter_full_of_nan_changes_no_bit_and_takes_no_step(pair, value):
    engine, trainer = pair()
    for i, name in enumerate("ab"):
        add(trainer, engine, name, seed=i)
    logprobs, loss, bits = alone(trainer)
    list(engine._writer.write(slot_of(engine, "b"), constant_adapter(engine, value, rank=4)))
    others = data([("b", 21), ("b", 65), ("b", 9)], seed=1)
    before = state(trainer, engine, "b")[:-1]
    result = trainer.forward_backward(mixed(data(OWN), others))
    assert not np.isfinite(result.losses["b"])
    assert result.losses["a"] == loss
    assert same([result.logprobs[i] for i in (1, 3, 4)], logprobs)
    assert same(arrays_of(trainer, "a"), bits)
    reports = trainer.optim_step(["b", "a"], 0.01)
    assert reports["b"].skipped and not reports["a"].skipped
    assert (reports["b"].steps, reports["a"].steps) == (1, 2)
    after = state(trainer, engine, "b")[:-1]
    assert all(x.tobytes() == y.tobytes() for x, y in zip(before, after, strict=True))


def test_a_step_of_another_changes_no_bit(pair):
    engine, trainer = pair()
    for i, name in enumerate("ab"):
        add(trainer, engine, name, seed=i)
    trainer.forward_backward(data([("a", 20), ("b", 30)]))
    before, kept = state(trainer, engine, "a"), arrays_of(trainer, "a")
    report = trainer.optim_step("b", 1e6, weight_decay=0.5)["b"]
    assert not report.skipped
    assert same(state(trainer, engine, "a"), before)
    assert same(arrays_of(trainer, "a"), kept)
    gradients(trainer, "a")
    logprobs, loss, bits = alone(trainer)
    others = data([("b", 21), ("b", 65), ("b", 9)], seed=1)
    result = trainer.forward_backward(mixed(data(OWN), others))
    assert same([result.logprobs[i] for i in (1, 3, 4)], logprobs)
    assert result.losses["a"] == loss and same(gradients(trainer, "a"), bits)


def test_a_small_bucket_changes_no_bit(pair):
    """On a CPU XLA adds up the numbers of few rows in another order than those of many."""
    engine, trainer = pair("qwen3_moe")
    add(trainer, engine, "a")
    own = data([("a", 33), ("a", 20)])
    expected, bits = trainer.forward_backward(own), gradients(trainer, "a")
    small = Trainer(engine, token_buckets=[64])
    small._adapters = trainer._adapters
    found = small.forward_backward(own)
    assert same(found.logprobs, expected.logprobs) and found.losses == expected.losses
    assert same(gradients(trainer, "a"), bits)


@pytest.mark.slow
def test_the_size_of_the_batch_changes_no_bit(pair):
    engine, trainer = pair()
    add(trainer, engine, "a")
    logprobs, loss, bits = alone(trainer)
    for size in (96, 320):
        other = Trainer(engine, token_buckets=[size])
        other._adapters = trainer._adapters
        found = other.forward_backward(data(OWN))
        assert same(found.logprobs, logprobs) and found.losses["a"] == loss
        assert same(gradients(trainer, "a"), bits), size
