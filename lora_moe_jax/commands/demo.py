"""`lora-moe-jax demo`: the pocket model and its adapters, served together."""

from __future__ import annotations

import argparse

from lora_moe_jax.commands.console import plain_console


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("demo", help="serve the pocket model and its adapters together")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from lora_moe_jax.demo import run_demo

    run_demo(plain_console())
