"""The JSON of `bench kernels`: where and with what it ran, and the rows of every section."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from lora_moe_jax.bench import (
    attention,
    layer,
    lora,
    lowering,
    mismatch_row,
    products,
    serving_row,
    slots,
    step_row,
    trainer_row,
    training,
)
from lora_moe_jax.bench.roofline import ceilings
from lora_moe_jax.errors import RequestError
from lora_moe_jax.strict_json import read_json_object

SCHEMA = 1
DRIVER_FILE = Path("/proc/driver/nvidia/version")
ROWS: dict[str, type] = {
    "slots": slots.SlotsRow,
    "products": products.ProductRow,
    "lora": lora.LoraRow,
    "training": training.TrainingRow,
    "layer": layer.LayerRow,
    "attention": attention.AttentionRow,
    "lowering": lowering.LoweringRow,
    "serving": serving_row.ServingRow,
    "step": step_row.StepRow,
    "trainer": trainer_row.TrainerRow,
    "mismatch": mismatch_row.MismatchRow,
}


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where the numbers come from; `driver` is None without an NVIDIA driver."""

    device: str
    driver: str | None
    machine: str
    python: str
    jax: str
    jaxlib: str
    date: str
    roofline_flops_per_second: float
    roofline_bytes_per_second: float


@dataclasses.dataclass(frozen=True)
class Report:
    """`sections` maps a section's name to its rows, dataclasses of the type in `ROWS`."""

    environment: Environment
    sections: Mapping[str, list[Any]]

    def write(self, file: Path) -> None:
        """Raises RequestError if the file cannot be written."""
        text = json.dumps({"schema": SCHEMA} | dataclasses.asdict(self), indent=1)
        try:
            file.write_text(text + "\n")
        except (OSError, ValueError) as cause:  # a NUL in the path is a ValueError
            raise RequestError("cannot write the report", file=file, found=str(cause)) from cause


def this_environment() -> Environment:
    return Environment(
        device=jax.devices()[0].device_kind,
        driver=_driver(),
        machine=platform.machine(),
        python=platform.python_version(),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        roofline_flops_per_second=ceilings().flops,
        roofline_bytes_per_second=ceilings().bytes,
    )


def _driver() -> str | None:
    if not DRIVER_FILE.exists():
        return None
    found = re.search(r"\d+\.\d+(\.\d+)*", DRIVER_FILE.read_text())
    return found and found[0]


def read_report(file: Path) -> Report:
    """Reads what `Report.write` wrote.

    Raises:
      RequestError: it is not such a file.
    """
    report = read_json_object(file, RequestError)
    if report.get("schema") != SCHEMA:
        raise RequestError(
            "this is not a report of this version",
            file=file,
            key="schema",
            expected=SCHEMA,
            found=report.get("schema"),
            hint="write it again with: lora-moe-jax bench kernels --json FILE",
        )
    try:
        sections = {name: _rows(name, rows) for name, rows in report["sections"].items()}
        return Report(Environment(**report["environment"]), sections)
    except (KeyError, TypeError, AttributeError) as cause:
        raise RequestError(
            "the report's fields are not those of this version", file=file, found=str(cause)
        ) from cause


def _rows(section: str, rows: list[dict[str, Any]]) -> list[Any]:
    kind = ROWS[section]
    return [kind(**row) for row in rows]
