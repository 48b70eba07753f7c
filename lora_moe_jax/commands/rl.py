"""`lora-moe-jax rl`: two adapters of the pocket model, trained by GRPO at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.commands.console import wide_console
from lora_moe_jax.commands.options import natural, positive


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "rl", help="train two adapters of the pocket model by GRPO, at once"
    )
    parser.add_argument("--steps", type=positive, default=30, help="(default 30)")
    parser.add_argument("--seed", type=natural, default=0, help="of sampling and first values")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for the adapters, each in a folder of its name"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from lora_moe_jax.training.rl_demo import run_rl

    run_rl(wide_console(), options.steps, options.seed, options.out)
