"""`lora-moe-jax train`: an adapter, from a JSONL file."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.commands.console import plain_console
from lora_moe_jax.commands.options import (
    MODEL_HELP,
    add_dtype_option,
    dtype_of,
    model_folder,
    natural,
    positive,
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("train", help="train an adapter on a JSONL file")
    parser.add_argument("--model", default="pocket", help=MODEL_HELP)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSONL; a line is {"prompt": …, "completion": …}, {"messages": […]} or {"text": …}',
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for the adapter; is created"
    )
    parser.add_argument("--rank", type=positive, default=16, help="(default 16)")
    parser.add_argument("--alpha", type=float, default=32.0, help="(default 32)")
    parser.add_argument(
        "--target-modules",
        action="append",
        metavar="NAME",
        help="such as o_proj or experts.up_proj; may be repeated. Default: all linear modules",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(default 0.001)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, help="default: as many as the epochs have")
    length.add_argument("--epochs", type=positive, help="(default 1)")
    parser.add_argument(
        "--batch-tokens", type=positive, default=2048, help="most of a step (default 2048)"
    )
    parser.add_argument("--seed", type=natural, default=0, help="of order and first values")
    add_dtype_option(parser)
    parser.add_argument("--max-length", type=positive, help="most tokens of one example")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from lora_moe_jax.training import LoraConfig, SftConfig
    from lora_moe_jax.training.sft_command import train_adapter

    lora = LoraConfig(
        rank=options.rank,
        alpha=options.alpha,
        target_modules=options.target_modules or "all-linear",
        seed=options.seed,
    )
    config = SftConfig(
        steps=options.steps,
        epochs=options.epochs or 1,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
    )
    train_adapter(
        plain_console(),
        model_folder(options.model),
        options.data,
        options.out,
        lora,
        config,
        dtype=dtype_of(options),
        max_length=options.max_length,
        seed=options.seed,
    )
