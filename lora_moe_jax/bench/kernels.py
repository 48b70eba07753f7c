"""`bench kernels`: measures the sections, prints a table each, and writes all rows as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
from lora_moe_jax.bench.kernel_cases import named
from lora_moe_jax.bench.report import Report, read_report, this_environment
from lora_moe_jax.bench.section import Job
from lora_moe_jax.bench.timing import best_timer, elapsed_times, on_gpu
from lora_moe_jax.errors import RequestError

SECTIONS = {
    "slots": slots,
    "products": products,
    "lora": lora,
    "training": training,
    "layer": layer,
    "attention": attention,
    "lowering": lowering,
}
TABLES = SECTIONS | {
    "serving": serving_row,
    "step": step_row,
    "trainer": trainer_row,
    "mismatch": mismatch_row,
}
CPU_SECTIONS = ("slots",)
GPU_SECTIONS = ("products", "lora", "training", "layer", "attention", "lowering")


def run_bench(
    console: Console,
    sections: Sequence[str] = (),
    shapes: Sequence[str] = (),
    json_file: Path | None = None,
) -> Report:
    """Measures and prints the sections (default: those for this machine) on the named shapes.

    The file is written after every case, so that a run cut short leaves what it has.
    """
    sections = sections or (GPU_SECTIONS if on_gpu() else CPU_SECTIONS)
    measured: dict[str, list[Any]] = {}
    report = Report(this_environment(), measured)
    if json_file is not None:
        report.write(json_file)  # a path that cannot be written is refused before the work
    for name in sections:
        section = SECTIONS[name]
        timer = elapsed_times if name == "layer" else best_timer()
        jobs = list(section.jobs(named(tuple(shapes)), timer))
        for rows in _each(console, name, jobs):
            measured.setdefault(name, []).extend(rows)
            if json_file is not None:
                report.write(json_file)
        if name in measured:
            console.print(section.table(measured[name]))
        else:
            console.print(f"{name}: nothing to measure for {', '.join(shapes)}")
    console.print(_caption(report))
    return report


def show(console: Console, file: Path) -> None:
    """Prints the tables of a report that was written earlier."""
    report = read_report(file)
    for name, rows in report.sections.items():
        try:
            table = TABLES[name].table(rows)
        except (TypeError, ValueError, RuntimeError) as cause:
            raise RequestError(
                "a report's fields are not what this version writes",
                file=file,
                key=name,
                expected="rows of numbers and text",
                found=str(cause),
            ) from cause
        console.print(table)
    console.print(_caption(report))


def _caption(report: Report) -> str:
    environment = report.environment
    driver = f", driver {environment.driver}" if environment.driver else ""
    return (
        f"{environment.device}{driver}; jax {environment.jax}, jaxlib {environment.jaxlib}, "
        f"Python {environment.python}; {environment.date}"
    )


def _each(console: Console, name: str, jobs: list[Job]) -> Iterator[list[Any]]:
    """The rows of one job after another; where no bar can show it, a line says which is next."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=len(jobs))
        for job in jobs:
            progress.update(task, description=f"{name}: {job.label}")
            if not console.is_terminal:
                console.print(f"{name}: {job.label}")
            yield job.run()
            progress.advance(task)
