"""`lora-moe-jax bench step`: the kernels of a decode step."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.commands.bench_model import add_model_option, model_config
from lora_moe_jax.commands.console import wide_console
from lora_moe_jax.commands.options import natural, positive


def add_parser(benchmarks: argparse._SubParsersAction) -> None:
    parser = benchmarks.add_parser(
        "step",
        help="what each kernel adds to a decode step (NVIDIA GPUs)",
        description="Decodes, and lists what each kernel adds to a step, from the end of the one "
        "before to its own. A few layers have the kernels of all, and are there in seconds.",
    )
    add_model_option(parser)
    parser.add_argument("--layers", type=positive, help="the model's first ones alone")
    parser.add_argument(
        "--decode", type=positive, default=1, metavar="REQUESTS", help="at a time (default 1)"
    )
    parser.add_argument("--context", type=positive, default=512, help="their prompts (default 512)")
    parser.add_argument(
        "--adapters",
        type=natural,
        default=0,
        help="that requests use in turns; with 0 the engine has no slots (default 0)",
    )
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument(
        "--output", type=positive, default=64, help="tokens to generate (default 64)"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from lora_moe_jax.bench.serving import Load
    from lora_moe_jax.bench.step import run_step

    run_step(
        wide_console(),
        options.model,
        model_config(options.model, options.layers),
        Load("decode", options.decode, options.context, options.adapters),
        rank=options.rank,
        output=options.output,
        json_file=options.json,
    )
