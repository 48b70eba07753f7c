"""`bench step`: what each kernel adds to a decode step, seen in the engine.

Alone, called again and again, a kernel has its weights and its code in the caches. In a model it
has not, and it begins when another one ends.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console

from lora_moe_jax.bench import serving
from lora_moe_jax.bench.report import Report, this_environment
from lora_moe_jax.bench.serving import Load
from lora_moe_jax.bench.step_row import StepRow, table
from lora_moe_jax.bench.timing import on_gpu
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.errors import RequestError
from lora_moe_jax.serving.engine import Engine

TAIL = "_mosaic_gpu_kernel"  # of the names of Pallas's kernels


class Launch(NamedTuple):
    """A kernel that ran, in nanoseconds of the device's clock."""

    start: float
    end: float
    kernel: str


def run_step(
    console: Console,
    name: str,
    config: ModelConfig,
    load: Load,
    *,
    rank: int,
    output: int,
    json_file: Path | None = None,
) -> Report:
    """Measures the decode steps of one load, prints the table and writes the rows as JSON.

    Raises:
      RequestError: there is no NVIDIA GPU, or its profiler saw nothing.
    """
    if not on_gpu():
        raise RequestError(
            "kernels are seen by the profiler of an NVIDIA GPU",
            expected="a GPU",
            found=jax.default_backend(),
            hint="bench serving measures whole steps anywhere",
        )
    rows: list[StepRow] = []
    report = Report(this_environment(), {"step": rows})
    if json_file is not None:
        report.write(json_file)
    engine, _ = serving.build_engine(config, [load], rank, False, "bfloat16", output)
    serving.measure(engine, load, output)  # the first call of everything
    step = statistics.median(serving.measure(engine, load, output).steps)
    launches, steps = traced(engine, load, output)
    sizes = name, config.num_layers, load.requests, load.context, load.adapters, rank
    rows += rows_of(launches, steps, step, sizes)
    if json_file is not None:
        report.write(json_file)
    console.print(table(rows))
    return report


def traced(engine: Engine, load: Load, output: int) -> tuple[list[Launch], int]:
    """What ran while all requests of a load decoded, and in how many steps."""
    counts = engine._runner.counts
    stream = serving.decoding(engine, load, output)
    begun = set()
    while len(begun) < load.requests:
        begun.add(next(stream).index)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            first = counts["steps"]
            while next(stream).completion is None:
                pass
            steps = counts["steps"] - first
        stream.close()
        return launches_in(Path(folder)), steps


def launches_in(folder: Path) -> list[Launch]:
    """The kernels of a profiler's trace, in the order in which they began.

    Raises:
      RequestError: it has none.
    """
    found = []
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if "GPU" in plane.name:
                found += launches_of(plane)
    if not found:
        raise RequestError(
            "the profiler saw no kernel", hint="it needs CUPTI, and no other profiler beside it"
        )
    return sorted(found)


def launches_of(plane) -> list[Launch]:
    """Those of a GPU's plane of `jax.profiler.ProfileData`."""
    return [
        Launch(event.start_ns, event.start_ns + event.duration_ns, event.name.removesuffix(TAIL))
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def rows_of(launches: Sequence[Launch], steps: int, step: float, sizes) -> list[StepRow]:
    """A row for each kernel, the one that takes most of a step first.

    Args:
      launches: in the order in which they began, of so many steps.
      step: seconds of one. sizes: the fields of `StepRow` that say what was measured.
    """
    added, alone, last = defaultdict(list), defaultdict(list), launches[0].start
    for launch in launches:
        # A kernel that ends before another that began earlier adds nothing.
        added[launch.kernel].append(max(0.0, launch.end - last) / 1e3)
        alone[launch.kernel].append((launch.end - launch.start) / 1e3)
        last = max(last, launch.end)
    rows = []
    for kernel, times in added.items():
        each, count = statistics.median(times), len(times) / steps
        share = 1e-6 * each * count / step
        times_alone = statistics.median(alone[kernel])
        rows.append(StepRow(*sizes, 1e3 * step, kernel, count, each, times_alone, share))
    return sorted(rows, key=lambda row: -row.share)
