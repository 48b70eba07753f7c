"""What `bench training` writes down of one load, and its table."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from lora_moe_jax.bench.section import ratio_cell, verdict_cell


@dataclasses.dataclass(frozen=True)
class TrainerRow:
    """One load: every batch is one forward and backward pass, and a step of every adapter.

    Attributes:
      layers: of the model; fewer than it has where more adapters are to fit into the memory.
      targets: "all linear", with the routed experts, or "attention".
      batch_ms: median time of a forward and backward pass.
      step_ms: of the steps of all adapters, with the engine's new versions.
      update_ms: median time of a new version in the engine, of `updates` in a row.
      update_growth: bytes that all of these have left on the device.
      tflops: useful FLOPs of both, per second; None off a GPU, as memory.
      share: the least time that these FLOPs take, over the time.
      peak_gib: the most memory in use since the process began.
      state_gib: parameters, moments and gradients of all adapters.
      over_one: tokens per second over those with one adapter, same targets and layers.
    """

    model: str
    layers: int
    adapters: int
    targets: str
    rank: int
    sequences: int
    length: int
    batch_ms: float
    step_ms: float
    update_ms: float
    updates: int
    update_growth: int
    tokens_per_second: float
    useful_tflop: float
    tflops: float | None
    share: float | None
    peak_gib: float | None
    state_gib: float
    over_one: float | None
    must: float | None
    aim: float | None
    verdict: str


def table(rows: list[TrainerRow]) -> Table:
    shown = Table(
        "model",
        "adapters",
        "sequences",
        "pass ms",
        "step ms",
        "update ms (bytes left)",
        "tokens/s",
        "TFLOP/s",
        "of the roofline",
        "peak GiB",
        "of it state",
        "over one",
        "must",
        "aim",
        "",
        title="Training a whole model's adapters",
    )
    for row in rows:
        shown.add_row(
            f"{row.model}, {row.layers} layers",
            f"{row.adapters}, r {row.rank}, {row.targets}",
            f"{row.sequences} × {row.length}",
            f"{row.batch_ms:.1f}",
            f"{row.step_ms:.1f}",
            f"{row.update_ms:.2f} ({row.update_growth})",
            f"{row.tokens_per_second:.0f}",
            ratio_cell(row.tflops, 0),
            ratio_cell(row.share),
            ratio_cell(row.peak_gib, 1),
            f"{row.state_gib:.2f}",
            ratio_cell(row.over_one, 3),
            "" if row.must is None else f"≥ {row.must:g}",
            "" if row.aim is None else f"≥ {row.aim:g}",
            verdict_cell(row.verdict),
        )
    return shown
