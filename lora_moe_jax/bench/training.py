"""Section `training`: forward and backward of an expert MLP with adapters over a frozen base."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from rich.table import Table

from lora_moe_jax.bench import arrays, roofline
from lora_moe_jax.bench.kernel_cases import (
    TRAINING_RANK,
    TRAINING_ROWS,
    TRAINING_SHAPE,
    TRAINING_SLOTS,
    TRAINING_TFLOPS,
)
from lora_moe_jax.bench.section import (
    Job,
    microseconds,
    ratio_cell,
    us_cell,
    verdict_cell,
    verdict_of_more,
)
from lora_moe_jax.bench.timing import Timer, elapsed_times, on_gpu, program
from pallas_kernels import Lora, grouped_lora_matmul
from pallas_kernels.shapes import ExpertShape


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """Times in µs and useful TFLOP/s of all kernels of a step; None off a GPU.

    Attributes:
      over_forward: the step over its forward alone.
      elapsed_us: a step's share of the time of many in flight.
    """

    shape: str
    rows: int
    slots: int
    rank: int
    useful_tflop: float
    kernels_us: float | None
    elapsed_us: float | None
    tflops: float | None
    over_forward: float
    must: float
    aim: float
    verdict: str


def jobs(shapes: tuple[ExpertShape, ...], timer: Timer) -> Iterator[Job]:
    if TRAINING_SHAPE in shapes:
        for slots in TRAINING_SLOTS:
            yield Job(
                f"{TRAINING_SHAPE.name}, {slots} slots",
                lambda slots=slots: [
                    measure(TRAINING_SHAPE, TRAINING_ROWS, slots, TRAINING_RANK, timer)
                ],
            )


def measure(
    shape: ExpertShape, rows: int, slots: int, rank: int, timer: Timer, elapsed=elapsed_times
) -> TrainingRow:
    arguments = _arguments(shape, rows, slots, rank)
    programs = {
        "step": program(lambda *arguments: _step(shape, *arguments), *arguments),
        "forward": program(lambda *arguments: _forward(shape, *arguments[:-1]), *arguments),
    }
    times = timer(programs)
    flops, gpu, step = roofline.training(shape, rows, rank), on_gpu(), times["step"].call
    in_flight = elapsed({"step": programs["step"]})["step"].call if gpu else None
    tflops = flops / step / 1e12 if gpu else None
    must, aim = TRAINING_TFLOPS
    return TrainingRow(
        shape=shape.name,
        rows=rows,
        slots=slots,
        rank=rank,
        useful_tflop=flops / 1e12,
        kernels_us=microseconds(step if gpu else None),
        elapsed_us=microseconds(in_flight),
        tflops=tflops,
        over_forward=step / times["forward"].call,
        must=must,
        aim=aim,
        verdict=verdict_of_more(tflops, must, aim),
    )


def _arguments(shape: ExpertShape, rows: int, slots: int, rank: int):
    sorted_rows = arrays.random_rows(shape.experts, rows, slots)
    banks = (
        *arrays.adapters(10, shape.gate_up, slots, rank),
        *arrays.adapters(20, shape.down, slots, rank),
    )
    factors = [(bank.a, bank.b) for bank in banks]
    return (
        arrays.normal(0, rows, shape.hidden),
        factors,
        [bank.scaling for bank in banks],
        arrays.weights(1, shape.gate_up),
        arrays.weights(2, shape.down),
        jnp.asarray(sorted_rows.group_sizes),
        jnp.asarray(sorted_rows.row_slots),
        arrays.normal(3, rows, shape.hidden),
    )


def _forward(shape: ExpertShape, x, factors, scalings, gate_up, down, sizes, row_slots):
    gate_lora, up_lora, down_lora = (
        Lora(a, b, scaling) for (a, b), scaling in zip(factors, scalings, strict=True)
    )
    hidden = grouped_lora_matmul(
        x,
        gate_up,
        sizes,
        row_slots,
        (gate_lora, up_lora),
        parts=shape.gate_up.parts,
        gate=shape.gate,
    )
    return grouped_lora_matmul(hidden, down, sizes, row_slots, (down_lora,))


def _step(shape: ExpertShape, x, factors, scalings, gate_up, down, sizes, row_slots, dy):
    """y, and the gradients of x and of every A and B."""

    def forward(x, factors):
        return _forward(shape, x, factors, scalings, gate_up, down, sizes, row_slots)

    y, pullback = jax.vjp(forward, x, factors)
    return y, *pullback(dy)


def table(rows: list[TrainingRow]) -> Table:
    shown = Table(
        "expert MLP",
        "adapters",
        "useful TFLOP",
        "kernels µs",
        "elapsed µs",
        "TFLOP/s",
        "must",
        "aim",
        "",
        "× forward",
        title="Forward and backward, bfloat16, base frozen",
    )
    for row in rows:
        shown.add_row(
            f"{row.shape}, {row.rows} rows",
            f"{row.slots} slots, r {row.rank}",
            f"{row.useful_tflop:.3f}",
            us_cell(row.kernels_us),
            us_cell(row.elapsed_us),
            ratio_cell(row.tflops, 0),
            f"≥ {row.must:g}",
            f"≥ {row.aim:g}",
            verdict_cell(row.verdict),
            ratio_cell(row.over_forward),
        )
    return shown
