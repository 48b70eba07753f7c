"""`bench mismatch` on a model small enough for a CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from lora_moe_jax.bench import mismatch
from lora_moe_jax.bench.mismatch import Found, Load
from lora_moe_jax.bench.mismatch_row import table
from lora_moe_jax.bench.report import read_report
from lora_moe_jax.bench.routing import rerouted
from lora_moe_jax.cli import main
from lora_moe_jax.errors import ConfigError
from tests.bench.test_serving import small_config
from tests.bench.test_tables import text_of


@pytest.mark.slow
def test_a_small_model(tmp_path, capsys):
    small_config(tmp_path)
    file = tmp_path / "mismatch.json"
    command = f"bench mismatch --model {tmp_path} --json {file} --dtype float32 --rank 4"
    sizes = "--tokens 40 --requests 3 --requests 1 --prompt 9 --output 5 --adapters 2"
    assert main([*command.split(), *sizes.split()]) == 0
    rows = read_report(file).sections["mismatch"]
    assert [(row.requests, row.sampler) for row in rows] == [
        (requests, side) for requests in (3, 1) for side in ("generate", "score")
    ]
    assert [row.tokens for row in rows[::2]] == [30, 10]
    assert all(
        score.tokens > made.tokens for made, score in zip(rows[::2], rows[1::2], strict=True)
    )
    for row in rows:
        assert row.largest == row.mean == row.differing == row.outside == row.rerouted == 0
    assert "equal bits" in capsys.readouterr().out
    assert main(["bench", "show", str(file)]) == 0


def test_every_adapter_is_sampled(tmp_path, monkeypatch):
    used: dict[tuple[int, ...], str] = {}

    class Stream:
        requests = ()

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    class FakeEngine:
        def sleep(self):
            return None

        wake = sleep

        def stream(self, prompts, params, adapters):
            for prompt, name in zip(prompts, adapters, strict=True):
                assert used.setdefault(tuple(prompt), name) == name, "or it is never cached"
            return Stream()

    monkeypatch.setattr(mismatch, "run_recorded", lambda *_: None)
    names = [str(i) for i in range(7)]
    load = Load(tokens=48, requests=(5, 1), prompt=30, output=4, adapters=7)
    list(mismatch._samples(FakeEngine(), small_config(tmp_path), load, names))
    assert set(used.values()) == set(names)


def test_what_is_counted(tmp_path):
    logprobs = [np.array([0, np.log(1.2)], np.float32), np.array([-0.05, 0], np.float32)]
    row = row_of(tmp_path, Found(logprobs, [], [3]))
    assert row.tokens == 4 and row.cached == 3 and row.differing == 0.5 and row.outside == 0.25
    assert row.largest == pytest.approx(np.log(1.2), rel=1e-6)
    assert row.mean == pytest.approx((np.log(1.2) + 0.05) / 4, rel=1e-6)
    assert row.rerouted is None


def test_experts_that_differ_are_a_miss(tmp_path):
    """In one of two layers, of one of three tokens, though all logprobs are equal."""
    mine = np.arange(12).reshape(2, 3, 2)
    its = mine.copy()
    its[1, 2] = its[1, 2, ::-1]
    parts = [rerouted(mine[:, :1], its[:, :1]), rerouted(mine[:, 1:], its[:, 1:])]
    row = row_of(tmp_path, Found([np.zeros(1), np.zeros(2)], parts, [0]))
    assert row.rerouted == pytest.approx(1 / 6) and row.largest == 0
    assert "16.6667%" in text_of(table([row])) and "MISS" in text_of(table([row]))


def row_of(folder, found):
    return mismatch._row("m", small_config(folder), Load(4, (1,), 2, 2, 1), 4, 1, "score", found)


def test_too_little_memory_is_explained(monkeypatch, tmp_path):
    def measure(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\n, details")

    monkeypatch.setattr(mismatch, "measure", measure)
    with pytest.raises(ConfigError, match="XLA_PYTHON_CLIENT_MEM_FRACTION") as caught:
        mismatch.run_mismatch(None, "m", small_config(tmp_path), Load(4, (1,), 2, 2, 1), rank=4)
    assert caught.value.found == "RESOURCE_EXHAUSTED: Out of memory"
