"""What `bench serving` writes down of one load, and its table."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from lora_moe_jax.bench.section import ratio_cell, verdict_cell


@dataclasses.dataclass(frozen=True)
class ServingRow:
    """One load.

    Attributes:
      adapters: how many the requests use, in turns; 0 for the base model.
      step_ms: median time of a decode step, or of a whole prefill.
      p50_ms, p90_ms, p99_ms: of the time between a request's tokens; None for a prefill.
      host_ms: of step_ms, what the host does not wait for the device.
      roofline_ms: the least that the work of a step takes.
      share: roofline_ms / step_ms.
      over_base: the speed over that without adapters.
      over_bytes: over_base over the ratio of the rooflines.
    """

    model: str
    phase: str
    requests: int
    context: int
    adapters: int
    rank: int
    shared_outer: bool
    step_ms: float
    tokens_per_second: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    host_ms: float
    roofline_ms: float
    share: float
    over_base: float | None
    over_bytes: float | None
    must: float | None
    aim: float | None
    verdict: str


def table(rows: list[ServingRow]) -> Table:
    shown = Table(
        "model",
        "phase",
        "requests × context",
        "adapters",
        "step ms",
        "tokens/s",
        "p50 / p90 / p99 ms",
        "host ms",
        "roofline ms",
        "share",
        "over base",
        "over bytes",
        "must",
        "aim",
        "",
        title="A whole model: every step through the engine",
    )
    for row in rows:
        adapters = f"{row.adapters}, r {row.rank}{' shared' * row.shared_outer}"
        between = [row.p50_ms, row.p90_ms, row.p99_ms]
        shown.add_row(
            row.model,
            row.phase,
            f"{row.requests} × {row.context}",
            adapters if row.adapters else "–",
            f"{row.step_ms:.2f}",
            f"{row.tokens_per_second:.0f}",
            "–" if None in between else " / ".join(f"{value:.2f}" for value in between),
            f"{row.host_ms:.2f}",
            f"{row.roofline_ms:.2f}",
            ratio_cell(row.share),
            ratio_cell(row.over_base, 3),
            ratio_cell(row.over_bytes, 3),
            "" if row.must is None else f"≥ {row.must:g}",
            "" if row.aim is None else f"≥ {row.aim:g}",
            verdict_cell(row.verdict),
        )
    return shown
