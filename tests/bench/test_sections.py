"""Every section run for real, on sizes a CPU can take."""

from __future__ import annotations

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from lora_moe_jax.bench import (
    arrays,
    attention,
    kernels,
    layer,
    lora,
    lowering,
    products,
    slots,
    timing,
    training,
)
from lora_moe_jax.bench.kernel_cases import (
    ATTENTION_CASES,
    LORA_CASES,
    PRODUCT_CASES,
    AttentionCase,
    LoraCase,
    ProductCase,
    Target,
    named,
)
from lora_moe_jax.bench.report import ROWS, read_report
from lora_moe_jax.bench.section import Job
from lora_moe_jax.cli import main
from pallas_kernels.shapes import EXPERT_SHAPES, ProductShape
from tests.bench.fakes import TINY

quick = functools.partial(timing.wall_times, rounds=2)


@pytest.fixture(autouse=True)
def numpy_inputs(monkeypatch):
    """Random values without a compilation for every shape."""

    def normal(seed, *shape, scale=1.0, dtype=arrays.DTYPE):
        return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), dtype)

    monkeypatch.setattr(arrays, "normal", normal)


def test_products():
    row = products.measure(ProductCase("tiny", TINY.gate_up, 24, Target(2, 1)), quick)
    assert row.kernel_over_dense > 0 and row.ragged_dot_over_kernel > 0
    assert row.kernel_us is None


def test_lora():
    cases = [LoraCase(2, rank=2, live=False), LoraCase(2, rank=2, gated=True, gather=True)]
    rows = lora.measure(TINY, "gate_up", "decode", 24, cases, quick)
    assert [row.case for row in rows] == [case.name for case in cases]
    assert all(row.kernel_over_off > 0 for row in rows)


def test_shared_lora():
    cases = [LoraCase(2, rank=2, shared=True), LoraCase(2, rank=2, gated=True)]
    (row,) = lora.measure(TINY, "down", "decode", 24, cases, quick)  # no gate follows down
    assert row.shared and row.kernel_over_off > 0


def test_training():
    row = training.measure(TINY, 24, 2, 2, quick)
    assert row.over_forward > 0 and row.tflops is None


@pytest.fixture
def few_layers(monkeypatch):
    monkeypatch.setattr(layer, "LAYERS", 3)


def test_layer(few_layers):
    outputs = {}

    def timer(programs):
        outputs.update({name: jax.device_get(run()) for name, run in programs.items()})
        return quick(programs)

    (row,) = layer.measure(TINY, (4,), timer, rank=2)
    assert row.lora_over_base > 0 and row.lora_us is None
    assert row.peer_us is None and row.verdict == ""
    for layers in outputs.values():
        assert [y.shape for y in layers] == [(4, TINY.hidden)] * layer.LAYERS
    # Every layer has inputs, choices and weights of its own, and adapters change the result.
    assert len({np.asarray(y).tobytes() for ys in outputs.values() for y in ys}) == 6
    for idle, base in zip(outputs["idle"], outputs["base"], strict=True):
        np.testing.assert_array_equal(idle, base)


BOUND = dict(bound="products", must=0.5, aim=0.9)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("grouped", TINY, 4, 2, 8, 16, 2, 20, tokens=20, page=8, window=5, **BOUND),
        AttentionCase("latent", TINY, 4, 0, 24, 16, 3, 20, page=8, **BOUND),
    ],
    ids=lambda case: case.name,
)
def test_attention(case):
    row = attention.measure(case, quick)
    assert row.roofline_us > 0 and row.kernel_us is None and row.verdict == ""
    y = np.asarray(attention._program(case)(), np.float32)
    assert y.shape == (case.requests * case.tokens, case.heads, case.value_width)
    assert np.isfinite(y).all()


def test_attention_gradients():
    sizes = dict(tokens=20, page=8, gradients=True)
    case = AttentionCase("gradients", TINY, 4, 2, 8, 16, 2, 20, **sizes, **BOUND)
    assert attention.measure(case, quick).roofline_us > 0
    dq, dk, dv = (np.asarray(x, np.float32) for x in attention._program(case)())
    assert [x.shape for x in (dq, dk, dv)] == [(40, 4, 8), (6, 8, 2, 8), (6, 8, 2, 16)]
    assert all(np.isfinite(x).all() and x.any() for x in (dq, dk, dv))


def test_lowering():
    rows = lowering.measure(TINY, TINY.gate_up, 24, lowering.Target())
    programs = ["product", "with adapters", "gradients", "gated, with adapters"]
    assert [row.program for row in rows] == programs
    assert all(row.trace_s > 0 and row.lower_s > 0 for row in rows)
    assert lowering.warm_up(TINY.down, lowering.Target()) == []


def test_jobs_cover_every_case():
    everything = named(())
    assert len(list(products.jobs(everything, quick))) == len(PRODUCT_CASES) == 7
    assert len(list(attention.jobs(everything, quick))) == len(ATTENTION_CASES)
    assert len(list(lora.jobs(everything, quick))) == 2 * 2 * 2 * len(EXPERT_SHAPES)
    assert len(list(layer.jobs(everything, quick))) == 2
    assert len(list(training.jobs(everything, quick))) == 2
    assert list(products.jobs(named(("gpt-oss-20b",)), quick)) == []
    assert len(list(lora.jobs(named(("gpt-oss-20b",)), quick))) == 8
    assert len({case.name for case in LORA_CASES}) == len(LORA_CASES)


def test_adapters_with_targets_are_measured_first(monkeypatch):
    measured = []

    def measure(shape, which, phase, rows, cases, timer):
        measured.extend((which, phase, case) for case in cases)

    monkeypatch.setattr(lora, "measure", measure)
    for job in lora.jobs(named(("gpt-oss-20b",)), quick):
        job.run()
    bounded = [case.bounded for _, _, case in measured]
    assert bounded == sorted(bounded, reverse=True) and len(set(bounded)) == 2
    assert len(measured) == len(set(measured)) == 4 * len(LORA_CASES)


@pytest.fixture
def small_slots(monkeypatch):
    monkeypatch.setattr(slots, "SHAPE", ProductShape("small", 4, 32, 32, (32,)))
    monkeypatch.setattr(slots, "ROWS", 64)
    monkeypatch.setattr(slots, "RANK", 2)
    monkeypatch.setattr(slots, "SLOTS", (2, 32))
    monkeypatch.setattr(kernels, "best_timer", lambda: quick)


def test_run_on_a_cpu(small_slots, tmp_path):
    text, file = io.StringIO(), tmp_path / "a.json"
    report = kernels.run_bench(Console(file=text, width=120), json_file=file)
    assert list(report.sections) == ["slots"]
    assert [row.slots for row in report.sections["slots"]] == [2, 32]
    assert all(row.over_dense > 0 and row.time_us is None for row in report.sections["slots"])
    assert read_report(file) == report
    assert "from 2 to 32 slots" in text.getvalue() and "jaxlib" in text.getvalue()


def test_a_run_cut_short_leaves_what_it_has(monkeypatch, tmp_path):
    file, row = tmp_path / "a.json", ROWS["slots"](2, None, 1.5)

    def cut_short():
        assert read_report(file).sections == {"slots": [row]}
        raise KeyboardInterrupt

    jobs = [Job("whole", lambda: [row]), Job("cut short", cut_short)]
    monkeypatch.setattr(slots, "jobs", lambda shapes, timer: jobs)
    with pytest.raises(KeyboardInterrupt):
        kernels.run_bench(Console(file=io.StringIO()), ["slots"], json_file=file)
    assert read_report(file).sections == {"slots": [row]}


def test_a_section_without_a_case_for_the_shape(tmp_path, capsys):
    file = tmp_path / "a.json"
    arguments = ["--only", "products", "--shape", "gpt-oss-20b", "--json", str(file)]
    assert main(["bench", "kernels", *arguments]) == 0
    assert "nothing to measure for gpt-oss-20b" in capsys.readouterr().out
    assert read_report(file).sections == {}


def test_bad_options(tmp_path, capsys):
    for arguments in (["--only", "nothing"], ["--shape", "nothing"]):
        with pytest.raises(SystemExit) as end:
            main(["bench", "kernels", *arguments])
        assert end.value.code == 2
    assert main(["bench", "kernels", "--json", str(tmp_path / "no" / "a.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
