"""`lora-moe-jax bench serving`: prefill and decode of a whole model."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.commands.bench_model import add_model_option, model_config
from lora_moe_jax.commands.console import wide_console
from lora_moe_jax.commands.options import add_mesh_option, positive


def add_parser(benchmarks: argparse._SubParsersAction) -> None:
    parser = benchmarks.add_parser("serving", help="prefill and decode of a whole model")
    add_model_option(parser)
    parser.add_argument(
        "--decode",
        type=positive,
        action="append",
        metavar="REQUESTS",
        help="requests that decode together; may be repeated (default 1, 32, 64)",
    )
    parser.add_argument(
        "--context", type=positive, default=1024, help="their prompts (default 1024)"
    )
    parser.add_argument(
        "--prefill", type=positive, default=4096, help="tokens of one prompt (default 4096)"
    )
    parser.add_argument(
        "--adapters",
        type=positive,
        action="append",
        help="adapters that requests use in turns; may be repeated (default 1, 8)",
    )
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--shared-outer", action="store_true", help="shared-outer adapters")
    parser.add_argument(
        "--output", type=positive, default=64, help="tokens to generate (default 64)"
    )
    parser.add_argument(
        "--decode-steps",
        type=positive,
        default=1,
        help="decode steps that the device takes by itself where it can (default 1)",
    )
    add_mesh_option(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from lora_moe_jax.bench.serving import run_serving, standard_loads

    run_serving(
        wide_console(),
        options.model,
        model_config(options.model),
        standard_loads(
            options.decode or (1, 32, 64),
            options.context,
            options.prefill,
            options.adapters or (1, 8),
        ),
        rank=options.rank,
        shared_outer=options.shared_outer,
        dtype=options.dtype,
        output=options.output,
        decode_steps=options.decode_steps,
        mesh_sizes=options.mesh,
        json_file=options.json,
    )
