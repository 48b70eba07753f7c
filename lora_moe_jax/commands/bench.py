"""`lora-moe-jax bench`: the benchmarks, one file each."""

from __future__ import annotations

import argparse

from lora_moe_jax.commands import (
    bench_kernels,
    bench_mismatch,
    bench_serving,
    bench_show,
    bench_step,
    bench_training,
)

BENCHMARKS = (
    bench_kernels,
    bench_serving,
    bench_step,
    bench_training,
    bench_mismatch,
    bench_show,
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("bench", help="measure")
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    for benchmark in BENCHMARKS:
        benchmark.add_parser(benchmarks)
