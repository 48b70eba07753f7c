"""`bench step`: what each kernel adds to a decode step, seen in the engine.

Alone, called again and again, a kernel has its weights and its code in the caches. In a model it
has not, and it begins when another one ends.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from lora_moe_jax.bench import serving
from lora_moe_jax.bench.launches import Launch, traced_call
from lora_moe_jax.bench.report import Report, this_environment
from lora_moe_jax.bench.serving import Load
from lora_moe_jax.bench.step_row import StepRow, table
from lora_moe_jax.bench.timing import on_gpu
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.errors import RequestError
from lora_moe_jax.serving.engine import Engine

TAIL = "_mosaic_gpu_kernel"  # of the names of Pallas's kernels


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
    first = counts["steps"]

    def decode():
        while next(stream).completion is None:
            pass

    launches = traced_call(decode)
    steps = counts["steps"] - first
    stream.close()
    return launches, steps


def rows_of(launches: Sequence[Launch], steps: int, step: float, sizes) -> list[StepRow]:
    """A row for each kernel, the one that takes most of a step first.

    Args:
      launches: in the order in which they began, of so many steps.
      step: seconds of one. sizes: the fields of `StepRow` that say what was measured.
    """
    added, alone, last = defaultdict(list), defaultdict(list), launches[0].start
    for launch in launches:
        # A kernel that ends before another that began earlier adds nothing.
        kernel = launch.kernel.removesuffix(TAIL)
        added[kernel].append(max(0.0, launch.end - last) / 1e3)
        alone[kernel].append((launch.end - launch.start) / 1e3)
        last = max(last, launch.end)
    rows = []
    for kernel, times in added.items():
        each, count = statistics.median(times), len(times) / steps
        share = 1e-6 * each * count / step
        times_alone = statistics.median(alone[kernel])
        rows.append(StepRow(*sizes, 1e3 * step, kernel, count, each, times_alone, share))
    return sorted(rows, key=lambda row: -row.share)
