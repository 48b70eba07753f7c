"""What `bench step` writes down of one kernel of a decode step, and its table."""

from __future__ import annotations

import dataclasses

from rich.table import Table

WORTH_A_LINE = 0.003  # of a step


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One kernel, by its name, in the decode steps of an engine.

    Attributes:
      layers: of the model, or of its first ones alone.
      step_ms: median time of a step, without a profiler.
      launches: in a step.
      added_us: median time from the end of the kernels before to its own end, so that waiting for
        it to begin counts. alone_us: from its own beginning on.
      share: of the step, launches × added.
    """

    model: str
    layers: int
    requests: int
    context: int
    adapters: int
    rank: int
    step_ms: float
    kernel: str
    launches: float
    added_us: float
    alone_us: float
    share: float


def table(rows: list[StepRow]) -> Table:
    shown = Table(
        "kernel",
        "a step",
        "adds µs",
        "alone µs",
        "of the step",
        title="Kernels of a decode step, as they are in the engine",
    )
    for load in dict.fromkeys(map(_load_of, rows)):
        its = [row for row in rows if _load_of(row) == load]
        shown.add_section()
        shown.add_row(f"[bold]{load}[/]", "", "", "", f"{its[0].step_ms:.3f} ms")
        large = [row for row in its if row.share >= WORTH_A_LINE]
        for row in large:
            shown.add_row(
                row.kernel,
                f"{row.launches:.3g}",
                f"{row.added_us:.2f}",
                f"{row.alone_us:.2f}",
                f"{row.share:.1%}",
            )
        of_all, of_large = (sum(row.share for row in some) for some in (its, large))
        shown.add_row(f"({len(its) - len(large)} others)", "", "", "", f"{of_all - of_large:.1%}")
        shown.add_row("(no kernel)", "", "", "", f"{1 - of_all:.1%}")
    return shown


def _load_of(row: StepRow) -> str:
    adapters = f"{row.adapters} adapters of r {row.rank}" if row.adapters else "no adapters"
    load = f"{row.requests} × {row.context}, {adapters}"
    return f"{row.model}, {row.layers} layers, {load}"
