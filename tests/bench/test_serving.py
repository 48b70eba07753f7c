"""`bench serving` on a model small enough for a CPU, and its counting by hand."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from lora_moe_jax import pocket
from lora_moe_jax.bench import serving
from lora_moe_jax.bench.report import read_report
from lora_moe_jax.bench.serving import Load
from lora_moe_jax.bench.serving_row import table
from lora_moe_jax.bench.serving_work import ModelSizes
from lora_moe_jax.cli import main
from lora_moe_jax.config.named import NAMED_CONFIGS, named_config
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import RequestError
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import abstract_model
from tests.adapters.tables import GOLDEN


def test_a_small_model(tmp_path, capsys, monkeypatch):
    engines, build_engine = [], serving.build_engine

    def build(*arguments):
        engines.append(build_engine(*arguments))
        return engines[-1]

    monkeypatch.setattr(serving, "build_engine", build)
    small_config(tmp_path)
    model, file = str(tmp_path), tmp_path / "serving.json"
    # So short that one step serves both phases: each compiles.
    sizes = "--context 8 --prefill 8 --adapters 1 --adapters 2 --rank 4 --output 6".split()
    command = ["bench", "serving", "--model", model, "--dtype", "float32", "--json", str(file)]
    assert main([*command, "--decode", "2", *sizes]) == 0
    rows = read_report(file).sections["serving"]
    assert [(row.phase, row.adapters) for row in rows] == [
        (phase, adapters) for adapters in (0, 1, 2) for phase in ("decode", "prefill")
    ]
    for row in rows:
        assert row.step_ms > row.host_ms > 0 and row.share > 0 and row.verdict == ""
        assert (row.over_base is None) == (row.adapters == 0)
        assert (row.p50_ms is None) == (row.phase == "prefill")
    assert "A whole model" in capsys.readouterr().out
    assert main(["bench", "show", str(file)]) == 0
    assert "2, r 4" in capsys.readouterr().out

    ((engine, _),) = engines
    with pytest.raises(RequestError, match="--output"):
        serving.measure(engine, Load("decode", 2, 8, 0), 1)


@pytest.mark.slow
def test_a_mesh(tmp_path):
    """Each of four devices has its part of the work; what one device must reach says nothing."""
    small_config(tmp_path)
    file = tmp_path / "serving.json"
    sizes = "--context 8 --prefill 8 --adapters 1 --rank 4 --output 6 --decode 2".split()
    command = ["bench", "serving", "--model", str(tmp_path), "--dtype", "float32", *sizes]
    floors = []
    for mesh in ([], ["--mesh", "expert=2,tensor=2"]):
        assert main([*command, *mesh, "--json", str(file)]) == 0
        rows = read_report(file).sections["serving"]
        floors.append([row.roofline_ms for row in rows])
    np.testing.assert_allclose(np.multiply(4, floors[1]), floors[0])
    assert all(row.must is None and "expert 2 × tensor 2" in row.model for row in rows)


@pytest.mark.parametrize(
    "option", ["--decode", "--context", "--adapters", "--rank", "--output", "--decode-steps"]
)
def test_sizes_are_positive(option, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "serving", option, "0"])
    assert f"argument {option}: expected an integer of at least 1" in capsys.readouterr().err


def small_config(folder):
    config = json.loads((GOLDEN / "qwen3_moe" / "base" / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "mlp_only_layers": []}
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


def sizes_of(name: str, **slots) -> ModelSizes:
    adapters = SlotConfig(**slots) if slots else None
    return ModelSizes.of(abstract_model(named_config(name), adapters=adapters))


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_sizes_are_those_that_were_published(name):
    """Qwen3-30B-A3B has 30.5 billion parameters, 3.3 active; DeepSeek-V2-Lite 15.7 and 2.4;
    gpt-oss-20b 20.9 and, without the embedding, 3.6."""
    sizes = sizes_of(name)
    config, moe = sizes.config, sizes.config.moe
    embedding = config.vocab_size * config.hidden_size
    total = sizes.dense + sizes.experts + embedding
    active = sizes.dense + embedding + sizes.experts * moe.top_k / moe.num_experts
    expected = {
        "qwen3-30b-a3b": (30.5e9, 3.35e9),
        "deepseek-v2-lite": (15.7e9, 2.66e9),
        "gpt-oss-20b": (20.9e9, 3.61e9 + 201088 * 2880),
    }[name]
    assert (total, active) == pytest.approx(expected, rel=0.01)


def test_bytes_are_those_of_the_dtype():
    config = named_config("qwen3-30b-a3b")
    half, whole = (
        ModelSizes.of(abstract_model(config, dtype=dtype)).step(4, 1, 100, 0)
        for dtype in ("bfloat16", "float32")
    )
    assert whole.bytes == 2 * half.bytes and whole.flops == half.flops


def test_each_load_is_measured_once():
    """A second time its prompts would be in the prefix cache."""
    loads = serving.standard_loads((8, 8), 200, 200, (1, 1))
    assert len(loads) == len(set(loads)) == 4


def test_decode_by_hand():
    sizes = sizes_of("qwen3-30b-a3b", slots=8, rank=16)
    experts = 128 * 3 * 2048 * 768 * 48
    cached = 2 * 4 * 128 * 48
    assert (sizes.experts, sizes.position) == (experts, cached)
    assert sizes.expert_slot == 128 * 3 * 16 * (2048 + 768) * 48
    attention_slot = 16 * (2 * (2048 + 4096) + 2 * (2048 + 512)) * 48
    assert sizes.dense_slot >= attention_slot
    alone = sizes.step(1, 1, 4096, 0)
    assert alone.bytes == pytest.approx(2 * (sizes.dense + experts / 16 + 4096 * cached))
    adapted = sizes.step(1, 1, 4096, 1)
    added = 2 * (sizes.dense_slot + sizes.expert_slot / 16)
    assert adapted.bytes - alone.bytes == pytest.approx(added)
    # Two requests with an adapter each read two slots; with the same one, some experts' once.
    two, shared = sizes.step(2, 1, 4096, 2), sizes.step(2, 1, 4096, 1)
    assert two.bytes - sizes.step(2, 1, 4096, 0).bytes == pytest.approx(2 * added)
    assert added < shared.bytes - sizes.step(2, 1, 4096, 0).bytes < 2 * added


def test_prefill_by_hand():
    sizes = sizes_of("deepseek-v2-lite")
    heads, widths, layers = 16, 2 * 512 + 64, 27
    step, pairs = sizes.step(1, 3, 10, 0), 8 + 9 + 10
    active = sizes.dense + sizes.experts * 6 / 64
    assert step.flops == pytest.approx(2 * (3 * active + layers * heads * widths * pairs))


def test_half_of_the_layers_of_gpt_oss_see_a_window():
    sizes = sizes_of("gpt-oss-20b")
    assert (sizes.seen(100), sizes.seen(1000)) == (100, (128 + 1000) / 2)
    assert sizes.seen(1000, tokens=10) == (137 + 1000) / 2
    long, longer = sizes.step(1, 1, 4000, 0), sizes.step(1, 1, 5000, 0)
    assert longer.bytes - long.bytes == pytest.approx(2 * 1000 * 2 * 8 * 64 * 12)
    assert longer.flops - long.flops == pytest.approx(2 * 1000 * 64 * 2 * 64 * 12)


@pytest.mark.parametrize(
    ("load", "step", "verdict"),
    [
        (Load("decode", 4, 100, 0), 1.3, "aim"),
        (Load("decode", 4, 100, 0), 1.6, "must"),
        (Load("decode", 4, 100, 0), 1.7, "MISS"),
    ],
)
def test_base_is_held_to_the_roofline(monkeypatch, load, step, verdict):
    monkeypatch.setattr(serving, "on_gpu", lambda: True)
    sizes = sizes_of("qwen3-30b-a3b")
    floor = sizes.step(4, 1, 100 + 3, 0).seconds
    times = serving.Times([step * floor] * 3, [1e-4] * 3)
    row = serving._row("m", sizes, load, 16, False, 6, times, [])
    assert row.verdict == verdict and row.share == pytest.approx(1 / step)
    text = io.StringIO()
    Console(file=text, width=220).print(table([row]))
    assert verdict in text.getvalue()


def test_adapters_are_held_to_the_base(monkeypatch):
    monkeypatch.setattr(serving, "on_gpu", lambda: True)
    sizes = sizes_of("qwen3-30b-a3b", slots=8, rank=16)
    base = serving._row(
        "m", sizes, Load("decode", 64, 100, 0), 16, False, 6, serving.Times([1.0], [0.1]), []
    )

    def row(adapters, seconds):
        load, times = Load("decode", 64, 100, adapters), serving.Times([seconds], [0.1])
        return serving._row("m", sizes, load, 16, False, 6, times, [base])

    assert [row(1, 1 / ratio).verdict for ratio in (0.96, 0.93, 0.9)] == ["aim", "must", "MISS"]
    floors = [sizes.step(64, 1, 103, n).seconds for n in (0, 8)]
    just = floors[1] / floors[0]
    assert row(8, just).over_bytes == pytest.approx(1)
    assert [row(8, just / r).verdict for r in (0.96, 0.92, 0.8)] == ["aim", "must", "MISS"]
    assert dataclasses.asdict(row(8, 1.0))["over_base"] == 1.0
    assert np.isfinite(row(8, 1.0).tokens_per_second)


def test_the_pocket_model_can_be_measured():
    assert ModelSizes.of(abstract_model(read_config(pocket.BASE))).experts > 0
