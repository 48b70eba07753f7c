"""`bench kernels`: grouped_lora_matmul against a dense product over the same rows.

Ratios of times measured in one run, each the median of interleaved repeats, so that whatever else
the machine does falls on all of them alike.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pallas_kernels import Lora, grouped_lora_matmul, routing_plan

REPEATS = 25


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one product; `slots` 0 is the base product alone."""

    name: str
    rows: int
    groups: int
    slots: int
    rank: int
    k: int
    n: int


CASES = tuple(
    Case(f"{slots} slots" if slots else "no adapters", 4096, 64, slots, 16, 512, 512)
    for slots in (0, 2, 8, 32)
)


@dataclasses.dataclass(frozen=True)
class Result:
    """Median seconds, and the time over that of the dense product."""

    case: Case
    seconds: float
    over_dense: float


def run_bench(console: Console, json_file: Path | None) -> list[Result]:
    """Measures, prints a table, and writes the numbers with device and versions."""
    results = measure(CASES)
    device = jax.devices()[0].device_kind
    first = CASES[0]
    table = Table(
        "case",
        "ms",
        "× dense",
        title=f"{first.rows} rows, {first.groups} experts, {first.k}→{first.n}, rank {first.rank}, "
        f"float32, on {device}",
    )
    for result in results:
        table.add_row(result.case.name, f"{1e3 * result.seconds:.2f}", f"{result.over_dense:.2f}")
    console.print(table)
    few, many = (next(r for r in results if r.case.slots == slots) for slots in (2, 32))
    growth = many.seconds / few.seconds
    console.print(f"from {few.case.slots} to {many.case.slots} slots: {growth:.2f} × the time")
    if json_file is not None:
        _write(json_file, results, device)
    return results


def measure(cases: tuple[Case, ...]) -> list[Result]:
    """Times every case and the dense product of the same rows, interleaved."""
    functions = [_dense(cases[0]), *map(_grouped, cases)]
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(REPEATS):
        for record, function in zip(times, functions, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            record.append(time.perf_counter() - start)
    dense, *grouped = map(statistics.median, times)
    return [
        Result(case, seconds, seconds / dense) for case, seconds in zip(cases, grouped, strict=True)
    ]


def _dense(case: Case) -> Callable[[], jax.Array]:
    x, w = _normal(case.rows, case.k), _normal(case.n, case.k)
    compiled = jax.jit(lambda x, w: x @ w.T).lower(x, w).compile()
    return lambda: compiled(x, w)


def _grouped(case: Case) -> Callable[[], jax.Array]:
    rng = np.random.default_rng(0)
    experts = jnp.asarray(rng.integers(0, case.groups, (case.rows, 1)), jnp.int32)
    slots = jnp.asarray(rng.integers(0, max(case.slots, 1), case.rows), jnp.int32)
    plan = routing_plan(experts, slots, case.groups)
    x, w = _normal(case.rows, case.k), _normal(case.groups, case.n, case.k)
    arguments = (x, w, plan.group_sizes)
    if case.slots:
        lora = Lora(
            _normal(case.slots, case.groups, case.rank, case.k),
            _normal(case.slots, case.groups, case.rank, case.n),
            jnp.ones((case.slots, 1)),
        )
        arguments += (plan.row_slots, (lora,))
    compiled = jax.jit(grouped_lora_matmul).lower(*arguments).compile()
    return lambda: compiled(*arguments)


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def _write(file: Path, results: list[Result], device: str) -> None:
    report = {
        "device": device,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "results": [dataclasses.asdict(result) for result in results],
    }
    file.write_text(json.dumps(report, indent=2) + "\n")
