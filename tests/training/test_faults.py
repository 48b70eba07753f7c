"""Interrupts, dropped streams and failures beside training: nothing is lost or counted twice."""

from __future__ import annotations

import signal

import jax
import numpy as np
import optax
import pytest

from lora_moe_jax import ConfigError, Engine, SamplingParams
from lora_moe_jax.training import DataOrder, LoraConfig, SftConfig, Trainer, run_sft
from lora_moe_jax.training import trainer as trainer_module
from lora_moe_jax.training.loss_value import MOST_LOSSES, _compiled
from tests.adapters.tables import GOLDEN
from tests.training.conftest import BUCKETS, ENGINE
from tests.training.helpers import add, data, gradients, same
from tests.training.test_sft import examples

BATCH = [("a", 20), ("b", 20)]


def interrupted(function, at: int):
    """The function, in whose `at`-th call Ctrl-C comes as it returns."""
    calls = []

    def call(*arguments, **named):
        found = function(*arguments, **named)
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return found

    return call


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_sum_counts_a_batch_for_all_adapters(pair, monkeypatch, at):
    engine, trainer = pair("qwen3_moe")
    for name in "ab":
        add(trainer, engine, name)
    for _ in range(2):
        trainer.forward_backward(data(BATCH))
    expected = {name: gradients(trainer, name) for name in "ab"}
    trainer.forward_backward(data(BATCH))
    monkeypatch.setattr(trainer_module, "sums", interrupted(trainer_module.sums, at))
    with pytest.raises(KeyboardInterrupt):
        trainer.forward_backward(data(BATCH))
    assert all(same(gradients(trainer, name), expected[name]) for name in "ab")


def test_a_dropped_stream_gives_its_slot_to_training(pair):
    engine, trainer = pair("qwen3_moe")
    names = [chr(ord("a") + i) for i in range(engine.options.max_adapters)]
    for name in names:
        add(trainer, engine, name)
    engine.load_adapter("served", GOLDEN / "qwen3_moe" / "adapters" / "per_expert")
    for _ in engine.stream([[1, 2, 3]], SamplingParams(max_tokens=9), ["served"]):
        break
    trainer.forward_backward(data([(name, 9) for name in names]))


@pytest.mark.parametrize("method", ["forward_backward", "optim_step"])
@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_a_step_that_is_not_taken_takes_no_examples(pair, monkeypatch, method, how):
    _, trainer = pair("qwen3_moe")
    config = SftConfig(steps=4, batch_tokens=40)

    def run(order, name):
        trainer.add_adapter(name, LoraConfig(rank=4, target_modules=["o_proj"]))
        return run_sft(trainer, name, examples(), config, order)

    whole, order = DataOrder(12), DataOrder(12)
    expected = [report.loss for report in run(whole, "whole")]
    reports = run(order, "a")
    losses = [next(reports).loss]
    before = order.taken
    real = getattr(trainer, method)

    def failing(*arguments, **named):
        raise ValueError("broken")

    fault = failing if how == "error" else interrupted(real, 1)
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, ValueError)):
        patch.setattr(trainer, method, fault)
        next(reports)
    steps = {info.name: info.steps for info in trainer.adapters()}["a"]
    taken = how == "interrupt" and method == "optim_step"  # it comes after the step
    assert steps == 1 + taken and (order.taken > before) == taken
    rest = SftConfig(steps=4 - steps, batch_tokens=40)
    losses += [report.loss for report in run_sft(trainer, "a", examples(), rest, order)]
    assert losses == expected[:1] + expected[steps:] and order.taken == whole.taken


def test_an_optimizer_whose_state_cannot_be_saved_is_refused(pair):
    engine, _ = pair("qwen3_moe")
    config = LoraConfig(rank=4, target_modules=["o_proj"])
    trainer = Trainer(engine, optimizer=optax.add_noise(0.01, 0.55, 0))
    with pytest.raises(ConfigError, match="cannot be saved"):
        trainer.add_adapter("a", config)
    assert not trainer.adapters() and not engine.adapters()


def test_losses_that_are_defined_anew_are_not_kept_for_ever(pair):
    engine, trainer = pair("qwen3_moe")
    add(trainer, engine, "a")
    for _ in range(MOST_LOSSES + 3):
        trainer.forward_backward(data([("a", 9)]), loss=lambda its, batch: -its * batch.weights)
    assert _compiled.cache_info().currsize == MOST_LOSSES


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_a_mesh_of_the_program_is_not_the_librarys():
    """For a critic of its own, say; two of these devices are the engine's."""
    base = GOLDEN / "qwen3_moe" / "base"
    greedy = SamplingParams(max_tokens=4, temperature=0)
    modules = ["o_proj", *(f"experts.{which}_proj" for which in ("gate", "up", "down"))]
    options = ENGINE | {"target_modules": modules}  # of all of them, compiling takes a minute
    expected = Engine.from_pretrained(base, **options).generate([[1, 2, 3]], greedy)[0].token_ids
    with jax.set_mesh(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])):
        engine = Engine.from_pretrained(base, **options)
        assert engine.generate([[1, 2, 3]], greedy)[0].token_ids == expected
        trainer = Trainer(engine, token_buckets=BUCKETS)
        trainer.add_adapter("a", LoraConfig(rank=4))
        losses = trainer.forward_backward(data([("a", 9)])).losses
        assert np.isfinite(losses["a"]) and not trainer.optim_step("a", 1e-3)["a"].skipped
        split = Engine.from_pretrained(base, mesh={"tensor": 2}, **options)
        assert split.generate([[1, 2, 3]], greedy)[0].token_ids == expected
        assert not jax.sharding.get_abstract_mesh().empty
