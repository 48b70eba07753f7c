"""Section `slots`: how a product's cost grows with its slots, over a dense product.

Small enough for a CPU, where it is what `bench kernels` runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
from rich.table import Table

from lora_moe_jax.bench import arrays
from lora_moe_jax.bench.section import Job, microseconds, us_cell
from lora_moe_jax.bench.timing import Timer, on_gpu, program
from pallas_kernels import grouped_lora_matmul
from pallas_kernels.shapes import ExpertShape, ProductShape

SHAPE = ProductShape("64 experts, 512→512", 64, 512, 512, (512,))
ROWS, RANK = 4096, 16
SLOTS = (0, 2, 8, 32)
DTYPE = jnp.float32


@dataclasses.dataclass(frozen=True)
class SlotsRow:
    """`slots` 0 is the base product alone; `time_us` is None off a GPU."""

    slots: int
    time_us: float | None
    over_dense: float


def jobs(shapes: tuple[ExpertShape, ...], timer: Timer) -> Iterator[Job]:
    del shapes  # its own
    yield Job("products over dense", lambda: measure(SHAPE, ROWS, SLOTS, timer))


def measure(shape: ProductShape, rows: int, slots: tuple[int, ...], timer: Timer) -> list[SlotsRow]:
    x = arrays.normal(0, rows, shape.k, dtype=DTYPE)
    w = arrays.weights(1, shape, dtype=DTYPE)
    programs = {"dense": program(lambda x, w: x @ w.T, x, w[0])}
    for count in slots:
        sorted_rows = arrays.random_rows(shape.groups, rows, count)
        arguments = (x, w, jnp.asarray(sorted_rows.group_sizes))
        if count:
            banks = arrays.adapters(2, shape, count, RANK, dtype=DTYPE)
            arguments += (jnp.asarray(sorted_rows.row_slots), banks)
        programs[f"{count}"] = program(grouped_lora_matmul, *arguments)
    times = timer(programs)
    return [
        SlotsRow(
            slots=count,
            time_us=microseconds(times[f"{count}"].call if on_gpu() else None),
            over_dense=times[f"{count}"].call / times["dense"].call,
        )
        for count in slots
    ]


def table(rows: list[SlotsRow]) -> Table:
    few, many = (next(row for row in rows if row.slots == slots) for slots in (2, 32))
    shown = Table(
        "slots",
        "µs",
        "× dense",
        title=f"{ROWS} rows, {SHAPE.name}, rank {RANK}, float32",
        min_width=60,
        caption=f"from 2 to 32 slots: {many.over_dense / few.over_dense:.2f} × the time",
    )
    for row in rows:
        shown.add_row(str(row.slots), us_cell(row.time_us), f"{row.over_dense:.2f}")
    return shown
