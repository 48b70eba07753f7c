"""`lora-moe-jax bench training`: training adapters of a whole model."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.commands.bench_model import add_model_option, model_config
from lora_moe_jax.commands.console import wide_console
from lora_moe_jax.commands.options import positive


def add_parser(benchmarks: argparse._SubParsersAction) -> None:
    parser = benchmarks.add_parser("training", help="training adapters of a whole model")
    add_model_option(parser)
    parser.add_argument("--layers", type=positive, help="the model's first ones alone")
    parser.add_argument(
        "--adapters",
        type=positive,
        action="append",
        help="adapters in a batch; may be repeated (default 1, and 1 on attention alone)",
    )
    parser.add_argument(
        "--sequences", type=positive, help="of a batch (default 4, at least one an adapter)"
    )
    parser.add_argument("--length", type=positive, default=4096, help="of each (default 4096)")
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from lora_moe_jax.bench.trainer import run_training, standard_loads

    run_training(
        wide_console(),
        options.model,
        model_config(options.model, options.layers),
        standard_loads(options.adapters, options.sequences, options.length),
        rank=options.rank,
        dtype=options.dtype,
        json_file=options.json,
    )
