"""Section `products`: base products against their roofline, lax.ragged_dot and a dense product."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from rich.table import Table

from lora_moe_jax.bench import arrays, roofline
from lora_moe_jax.bench.kernel_cases import PRODUCT_CASES, ProductCase
from lora_moe_jax.bench.section import (
    Job,
    microseconds,
    ratio,
    ratio_cell,
    us_cell,
    verdict_cell,
)
from lora_moe_jax.bench.timing import Program, Timer, on_gpu, program
from pallas_kernels import grouped_lora_matmul
from pallas_kernels.shapes import ExpertShape

RAGGED_DOT_SECONDS = 0.1  # where lax.ragged_dot takes longer, it is left out


@dataclasses.dataclass(frozen=True)
class ProductRow:
    """Times in µs; None off a GPU, where only the ratios of times mean anything."""

    case: str
    shape: str
    groups: int
    k: int
    n: int
    rows: int
    implementation: str | None
    roofline_us: float
    kernel_us: float | None
    call_us: float | None
    over_roofline: float | None
    ragged_dot_us: float | None
    ragged_dot_over_kernel: float | None
    dense_us: float | None
    kernel_over_dense: float
    must: float
    aim: float
    verdict: str


def jobs(shapes: tuple[ExpertShape, ...], timer: Timer) -> Iterator[Job]:
    wanted = {product for shape in shapes for product in shape.products}
    for case in PRODUCT_CASES:
        if case.shape in wanted:
            yield Job(case.name, lambda case=case: [measure(case, timer)])


def measure(case: ProductCase, timer: Timer) -> ProductRow:
    shape = case.shape
    rows = arrays.random_rows(shape.groups, case.rows, 0)
    x, w = arrays.normal(0, case.rows, shape.k), arrays.weights(1, shape)
    sizes = jnp.asarray(rows.group_sizes)
    programs = {"kernel": program(grouped_lora_matmul, x, w, sizes)} | others(x, w, sizes)
    times = timer(programs)
    floor = roofline.product(shape, case.rows, rows.active).seconds
    kernel, ragged_dot = times["kernel"].pallas, times.get("ragged_dot")
    gpu = on_gpu()
    over_roofline = kernel / floor if gpu else None
    return ProductRow(
        case=case.name,
        shape=shape.name,
        groups=shape.groups,
        k=shape.k,
        n=shape.n,
        rows=case.rows,
        implementation=times["kernel"].implementation if gpu else None,
        roofline_us=1e6 * floor,
        kernel_us=microseconds(kernel if gpu else None),
        call_us=microseconds(times["kernel"].call if gpu else None),
        over_roofline=over_roofline,
        ragged_dot_us=microseconds(ragged_dot.call if gpu and ragged_dot else None),
        ragged_dot_over_kernel=ratio(ragged_dot and ragged_dot.call, kernel),
        dense_us=microseconds(times["dense"].call if gpu else None),
        kernel_over_dense=kernel / times["dense"].call,
        must=case.target.must,
        aim=case.target.aim,
        verdict=case.target.verdict(over_roofline),
    )


def others(x: jax.Array, w: jax.Array, sizes: jax.Array) -> dict[str, Program]:
    """A dense product of equal FLOPs; lax.ragged_dot unless it would take too long."""
    programs = {"dense": program(lambda x, w: x @ w.T, x, w[0])}
    # On a GPU it multiplies every row by every group's weight.
    seconds = 2 * x.size * w.shape[1] * w.shape[0] / roofline.ceilings().flops
    if seconds < RAGGED_DOT_SECONDS:
        right = jnp.swapaxes(w, 1, 2)
        programs["ragged_dot"] = program(lax.ragged_dot, x, right, sizes)
    return programs


def table(rows: list[ProductRow]) -> Table:
    shown = Table(
        "product",
        "E, K→N, rows",
        "roofline µs",
        "kernel µs",
        "× roofline",
        "must",
        "aim",
        "",
        "call µs",
        "ragged_dot µs (× kernel)",
        "dense µs (kernel ×)",
        title="Base products, bfloat16",
    )
    for row in rows:
        shown.add_row(
            f"{row.case} (xla)" if row.implementation == "xla" else row.case,
            f"{row.groups}, {row.k}→{row.n}, {row.rows}",
            us_cell(row.roofline_us),
            us_cell(row.kernel_us),
            ratio_cell(row.over_roofline),
            f"≤ {row.must:g}",
            f"≤ {row.aim:g}",
            verdict_cell(row.verdict),
            us_cell(row.call_us),
            f"{us_cell(row.ragged_dot_us)} ({ratio_cell(row.ragged_dot_over_kernel, 1)})",
            f"{us_cell(row.dense_us)} ({ratio_cell(row.kernel_over_dense)})",
        )
    return shown
