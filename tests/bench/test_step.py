"""`bench step`: a small model's steps, with kernels that a profiler would have seen on a GPU."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lora_moe_jax.bench import step
from lora_moe_jax.bench.launches import Launch
from lora_moe_jax.bench.report import read_report
from lora_moe_jax.bench.step import rows_of
from lora_moe_jax.bench.step_row import table
from lora_moe_jax.cli import main
from tests.bench.test_serving import small_config

SIZES = "model", 2, 1, 512, 0, 16
# Of a step: 2 µs until the product runs for 3, a norm that runs beside its end, and two joins.
STEP = [(2, 5, "product"), (4, 6, "norm"), (7, 8, "join"), (9, 10, "join")]
LAUNCHES = [
    Launch(1e3 * (10 * number + start), 1e3 * (10 * number + end), kernel)
    for number in range(3)
    for start, end, kernel in STEP
]
PALLAS = [launch._replace(kernel=f"{launch.kernel}_mosaic_gpu_kernel") for launch in LAUNCHES]


def test_what_each_kernel_adds():
    rows = {row.kernel: row for row in rows_of(PALLAS, 3, 10e-6, SIZES)}  # the suffix goes
    assert list(rows) == ["product", "join", "norm"]
    product, join, norm = rows.values()
    # From the end of the step before, at 0, to 5; the first one has none before it.
    assert (product.launches, product.added_us, product.alone_us) == (1, 5, 3)
    assert (join.launches, join.added_us, join.alone_us) == (2, 2, 1)
    assert (norm.launches, norm.added_us, norm.alone_us) == (1, 1, 2)
    assert [row.share for row in rows.values()] == pytest.approx([0.5, 0.4, 0.1])
    assert product.step_ms == pytest.approx(0.01)


def test_a_table_has_what_is_large_and_the_rest():
    small = [Launch(its.end, its.end + 1, "tiny") for its in LAUNCHES]
    rows = rows_of(sorted([*LAUNCHES, *small]), 3, 20e-6, SIZES)
    text = io.StringIO()
    Console(file=text, width=200).print(table(rows))
    lines = text.getvalue().splitlines()
    shares = {
        line.split("│")[1].strip(): line.split("│")[-2].strip() for line in lines if "│" in line
    }
    assert shares["model, 2 layers, 1 × 512, no adapters"] == "0.020 ms"
    assert shares["product"] == "25.0%" and "tiny" not in shares
    assert "(1 others)" in shares and float(shares["(no kernel)"].rstrip("%")) == pytest.approx(
        100 * (1 - sum(row.share for row in rows)), abs=0.1
    )


@pytest.mark.slow
def test_a_small_model(tmp_path, capsys, monkeypatch):
    """All but the kernels, which nothing sees here."""
    small_config(tmp_path)
    file = tmp_path / "step.json"
    monkeypatch.setattr(step, "on_gpu", lambda: True)
    monkeypatch.setattr(step, "traced_call", lambda run: (run(), LAUNCHES)[1])
    sizes = "--decode 2 --context 8 --adapters 1 --rank 4 --output 8".split()
    command = ["bench", "step", "--model", str(tmp_path), "--layers", "1", *sizes]
    assert main([*command, "--json", str(file)]) == 0
    rows = read_report(file).sections["step"]
    assert [row.kernel for row in rows] == ["product", "join", "norm"]
    assert all((row.layers, row.requests, row.adapters) == (1, 2, 1) for row in rows)
    assert rows[0].step_ms > 0 and 0 < rows[0].launches <= 3
    capsys.readouterr()
    assert main(["bench", "show", str(file)]) == 0
    assert "2 × 8, 1 adapters of r 4" in capsys.readouterr().out


def test_it_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(step, "on_gpu", lambda: False)
    assert main(["bench", "step"]) == 2
    assert "profiler of an NVIDIA GPU" in capsys.readouterr().err
