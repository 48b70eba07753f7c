"""`bench training` on a model small enough for a CPU, and its counting by hand."""

from __future__ import annotations

import dataclasses

import pytest

from lora_moe_jax.bench import trainer
from lora_moe_jax.bench.report import read_report
from lora_moe_jax.bench.trainer import Load
from lora_moe_jax.cli import main
from lora_moe_jax.config.named import named_config
from tests.bench.test_serving import sizes_of, small_config

UPDATES = trainer.Updates(1000, 0.004, 0)


@pytest.mark.slow
def test_a_small_model(tmp_path, capsys):
    small_config(tmp_path)
    file = tmp_path / "training.json"
    command = f"bench training --model {tmp_path} --dtype float32 --json {file} --rank 4 --layers 1"
    assert main([*command.split(), *"--adapters 2 --length 12 --sequences 3".split()]) == 0
    (row,) = read_report(file).sections["trainer"]
    assert (row.adapters, row.sequences, row.layers) == (2, 3, 1)
    assert row.batch_ms > 0 and row.step_ms > 0 and row.update_ms > 0 and row.state_gib > 0
    assert (row.updates, row.update_growth) == (1000, 0)
    assert row.over_one is None and row.tflops is None and row.verdict == ""
    assert "Training a whole model" in capsys.readouterr().out
    assert main(["bench", "show", str(file)]) == 0


def test_many_adapters_are_compared_with_one():
    sizes, seconds = sizes_of("qwen3-30b-a3b"), (2.0, 0.5)
    one = trainer._row("m", sizes, Load(1, "all linear", 8, 64), 16, seconds, UPDATES, 2**30, [])
    eight = Load(8, "all linear", 8, 64)
    row = trainer._row("m", sizes, eight, 16, (2.5, 0.5), UPDATES, 8 * 2**30, [one])
    assert one.tokens_per_second == pytest.approx(8 * 64 / 2.5)
    assert row.over_one == pytest.approx(2.5 / 3) and row.state_gib == 8
    attention = dataclasses.replace(one, targets="attention")
    assert trainer._row("m", sizes, eight, 16, seconds, UPDATES, 0, [attention]).over_one is None


def test_without_numbers_attention_is_measured_too():
    loads = trainer.standard_loads(None, None, 64)
    assert loads == [Load(1, "all linear", 4, 64), Load(1, "attention", 4, 64)]
    assert trainer.standard_loads([1, 8], 4, 64)[1] == Load(8, "all linear", 8, 64)


def test_targets(tmp_path):
    load, config = Load(1, "attention", 1, 64), small_config(tmp_path)
    attention = {name.rpartition(".")[2] for name in trainer._targets(config, load)}
    assert attention == {"q_proj", "k_proj", "v_proj", "o_proj"}
    every = trainer._targets(config, dataclasses.replace(load, targets="all linear"))
    leaves = {name.rpartition(".")[2] for name in every}
    assert leaves == attention | {"gate_proj", "up_proj", "down_proj"}


def test_useful_operations_of_a_dense_layer():
    sizes = sizes_of("qwen3-30b-a3b", slots=1, rank=16)
    alone = dataclasses.replace(sizes, experts=0, expert_slot=0, attention=0)
    expected = 2 * 100 * (2 * sizes.dense + 3 * sizes.dense_slot)
    assert alone.training_flops(1, 100) == expected
    pairs = dataclasses.replace(alone, dense=0, dense_slot=0, attention=7)
    assert pairs.training_flops(2, 4) == 2 * 3 * 7 * 2 * (1 + 2 + 3 + 4)


@pytest.mark.parametrize("value, verdict", [(30_000, "aim"), (16_000, "must"), (14_000, "MISS")])
def test_what_the_whole_model_is_held_to(monkeypatch, value, verdict):
    monkeypatch.setattr(trainer, "on_gpu", lambda: True)
    sizes, load = sizes_of("qwen3-30b-a3b"), Load(1, "all linear", 1, 4096)
    seconds = 4096 / value, 0.0
    row = trainer._row("qwen3-30b-a3b", sizes, load, 16, seconds, UPDATES, 2**30, [])
    assert (row.verdict, row.must, row.aim) == (verdict, 15_000, 22_000)
    fewer = dataclasses.replace(sizes, config=named_config("qwen3-30b-a3b").first_layers(4))
    assert trainer._target("qwen3-30b-a3b", fewer, load, value, None) == (None, None, None)
