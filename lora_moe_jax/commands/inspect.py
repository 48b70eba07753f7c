"""`lora-moe-jax inspect`: what is in an adapter or checkpoint folder."""

from __future__ import annotations

import argparse

from lora_moe_jax.commands.console import plain_console
from lora_moe_jax.commands.options import MODEL_HELP, model_folder, natural, positive


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("inspect", help="what is in an adapter or checkpoint folder")
    parser.add_argument("folder", help="adapter folder, " + MODEL_HELP)
    parser.add_argument("--model", default="pocket", help="the adapter's base: " + MODEL_HELP)
    parser.add_argument("--max-rank", type=positive, default=32, help="rank of a slot (default 32)")
    parser.add_argument("--max-adapters", type=natural, default=8, help="slots (default 8)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from lora_moe_jax.inspect import inspect_folder

    folder, base = model_folder(options.folder), model_folder(options.model)
    inspect_folder(plain_console(), folder, base, options.max_rank, options.max_adapters)
