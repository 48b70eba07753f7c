"""`lora-moe-jax bench show`: the tables of a file that `--json` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.commands.console import wide_console


def add_parser(benchmarks: argparse._SubParsersAction) -> None:
    parser = benchmarks.add_parser("show", help="the tables of a file that --json wrote")
    parser.add_argument("file", type=Path)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from lora_moe_jax.bench.kernels import show

    show(wide_console(), options.file)
