"""`lora-moe-jax bench kernels`: the kernels against their roofline and others."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.bench.kernels import SECTIONS, run_bench
from lora_moe_jax.commands.console import wide_console
from pallas_kernels.shapes import EXPERT_SHAPES


def add_parser(benchmarks: argparse._SubParsersAction) -> None:
    parser = benchmarks.add_parser("kernels", help="the kernels against their roofline and others")
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(SECTIONS),
        help="a section to run; may be repeated. Default: slots on a CPU, all others on a GPU",
    )
    parser.add_argument(
        "--shape",
        action="append",
        choices=tuple(EXPERT_SHAPES),
        help="a model's experts; may be repeated. Default: all",
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    run_bench(wide_console(), options.only or (), options.shape or (), options.json)
