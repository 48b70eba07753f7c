"""The JSON of a run: complete, readable again, refused when it is something else."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lora_moe_jax.bench.kernels import TABLES
from lora_moe_jax.bench.report import ROWS, Environment, Report, read_report, this_environment
from lora_moe_jax.cli import main
from lora_moe_jax.errors import RequestError


def a_row(kind, seed):
    """A row with a value of the right type in every field."""
    values = {"str": f"s{seed}", "int": 2 + seed, "float": seed + 0.25, "bool": bool(seed % 2)}
    fields = {field.name: field.type.split(" | ")[0] for field in dataclasses.fields(kind)}
    return kind(**{name: values[type_name] for name, type_name in fields.items()})


def a_report() -> Report:
    sections = {name: [a_row(kind, seed) for seed in range(2)] for name, kind in ROWS.items()}
    sections["slots"] = [ROWS["slots"](slots, None, 1.5) for slots in (0, 2, 8, 32)]
    return Report(this_environment(), sections)


def test_every_section_has_a_row_type():
    assert set(ROWS) == set(TABLES)


def test_round_trip(tmp_path):
    report = a_report()
    report.write(tmp_path / "a.json")
    assert read_report(tmp_path / "a.json") == report


def test_says_where_it_ran():
    environment = dataclasses.asdict(this_environment())
    for key in ("device", "machine", "python", "jax", "jaxlib", "date"):
        assert environment[key]
    assert environment["roofline_flops_per_second"] == 790e12


def test_show_prints_every_table(tmp_path, capsys):
    report = a_report()
    report = dataclasses.replace(
        report,
        environment=Environment("NVIDIA H200", "580.1", "x86_64", "3.12", "1", "2", "d", 1.0, 2.0),
    )
    report.write(tmp_path / "a.json")
    assert main(["bench", "show", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    for title in (
        "Base products",
        "with adapters",
        "Forward and backward",
        "Whole MoE",
        "Paged attention",
        "A whole model",
        "lowering",
    ):
        assert title in shown
    assert "NVIDIA H200, driver 580.1; jax 1, jaxlib 2, Python 3.12; d" in shown


def change_schema(report):
    report["schema"] = 99


def drop_a_field(report):
    del report["sections"]["layer"][0]["tokens"]


def add_a_section(report):
    report["sections"]["other"] = []


def rows_of_another_type(report):
    report["sections"] = []


def test_fields_of_other_types_are_refused(tmp_path, capsys):
    file = tmp_path / "a.json"
    a_report().write(file)
    report = json.loads(file.read_text())
    report["sections"]["layer"][0]["lora_over_base"] = "twice"
    file.write_text(json.dumps(report))
    assert main(["bench", "show", str(file)]) == 2
    assert "layer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "spoil", [change_schema, drop_a_field, add_a_section, rows_of_another_type]
)
def test_other_files_are_refused(tmp_path, spoil, capsys):
    file = tmp_path / "a.json"
    a_report().write(file)
    report = json.loads(file.read_text())
    spoil(report)
    file.write_text(json.dumps(report))
    with pytest.raises(RequestError):
        read_report(file)
    assert main(["bench", "show", str(file)]) == 2
    assert "a.json" in capsys.readouterr().err


def test_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(RequestError, match="cannot write"):
        a_report().write(tmp_path / "no folder" / "a.json")
