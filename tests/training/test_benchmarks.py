"""`bench training` and `bench mismatch` from the command to the table, with the shared trainer.

`tests/bench` runs them with engines of their own, which takes minutes.
"""

from __future__ import annotations

import pytest

from lora_moe_jax.bench import mismatch, trainer
from lora_moe_jax.bench.report import read_report
from lora_moe_jax.bench.serving_work import ModelSizes
from lora_moe_jax.cli import main
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import abstract_model
from tests.bench.test_serving import small_config


@pytest.fixture
def command(small_pair, monkeypatch, tmp_path):
    """`command(name, sizes)`: runs it, and gives the rows that it wrote."""
    engine, shared = small_pair
    model = abstract_model(small_config(tmp_path), adapters=SlotConfig(2, 4))
    monkeypatch.setattr(trainer, "_engine", lambda *_: (engine, ModelSizes.of(model)))
    monkeypatch.setattr(mismatch, "_engine", lambda *_: engine)
    monkeypatch.setattr(trainer, "UPDATES", 3)
    for module in (trainer, mismatch):
        monkeypatch.setattr(module, "Trainer", lambda *_, **__: shared)

    def run(name: str, sizes: str):
        file = tmp_path / f"{name}.json"
        options = f"--model {tmp_path} --dtype float32 --rank 4 --json {file}"
        assert main(["bench", name, *options.split(), *sizes.split()]) == 0
        (rows,) = read_report(file).sections.values()
        assert main(["bench", "show", str(file)]) == 0
        return rows

    yield run
    for info in shared.adapters():
        shared.remove_adapter(info.name)
        engine.unload_adapter(info.name)


@pytest.mark.slow
def test_training(command, capsys):
    (row,) = command("training", "--adapters 2 --length 12 --sequences 3")
    assert (row.adapters, row.sequences) == (2, 3)
    assert row.batch_ms > 0 and row.step_ms > 0 and row.update_ms > 0 and row.state_gib > 0
    assert (row.updates, row.update_growth) == (3, 0)
    assert row.over_one is None and row.tflops is None and row.verdict == ""
    assert capsys.readouterr().out.count("Training a whole model") == 2


@pytest.mark.slow
def test_mismatch(command, capsys):
    sizes = "--tokens 30 --requests 6 --prompt 80 --output 5 --adapters 2"
    generated, scored = command("mismatch", sizes)
    assert generated.tokens == 30 < scored.tokens
    assert generated.cached > 0 == scored.cached
    for row in (generated, scored):
        assert row.largest == row.mean == row.differing == row.outside == row.rerouted == 0
    assert capsys.readouterr().out.count("equal bits") == 2 * 2
