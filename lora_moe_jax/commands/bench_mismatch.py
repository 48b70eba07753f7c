"""`lora-moe-jax bench mismatch`: what the sampler computed against the trainer's."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.commands.bench_model import add_model_option, model_config
from lora_moe_jax.commands.console import wide_console
from lora_moe_jax.commands.options import positive


def add_parser(benchmarks: argparse._SubParsersAction) -> None:
    parser = benchmarks.add_parser(
        "mismatch",
        help="logprobs and experts of the sampler and of the trainer",
        description="Samples, and compares each token's logprob, and the experts that every router "
        "chose for it, with the trainer's. Weights, a cache for all requests and the adapters in "
        "training have to fit into the memory of one device; JAX takes 0.75 of a GPU's, more with "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment.",
    )
    add_model_option(parser)
    parser.add_argument("--layers", type=positive, help="the model's first ones alone")
    parser.add_argument(
        "--tokens", type=positive, default=100_000, help="to sample (default 100000)"
    )
    parser.add_argument(
        "--requests",
        type=positive,
        action="append",
        help="at a time, in turns; may be repeated (default 64, 8, 1)",
    )
    parser.add_argument("--prompt", type=positive, default=512, help="the longest (default 512)")
    parser.add_argument("--output", type=positive, default=256, help="of each (default 256)")
    parser.add_argument(
        "--adapters", type=positive, default=1, help="in turns, all in training (default 1)"
    )
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from lora_moe_jax.bench.mismatch import Load, run_mismatch

    # A number twice would be one row.
    requests = tuple(dict.fromkeys(options.requests or (64, 8, 1)))
    sizes = options.tokens, requests, options.prompt, options.output, options.adapters
    run_mismatch(
        wide_console(),
        options.model,
        model_config(options.model, options.layers),
        Load(*sizes),
        rank=options.rank,
        dtype=options.dtype,
        json_file=options.json,
    )
