"""The command line: the entry point, and the list of commands."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from lora_moe_jax.commands import bench, demo, generate, inspect, rl, score, serve, train
from lora_moe_jax.commands.console import plain_console
from lora_moe_jax.errors import LoraMoeError
from lora_moe_jax.version import __version__

DESCRIPTION = "Train and serve many LoRA adapters at once over one Mixture-of-Experts base model."
COMMANDS = (demo, generate, score, serve, train, rl, inspect, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns the exit status (2 for bad input, 130 after Ctrl-C)."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of characters that it does not know
    try:
        return options.run(options) or 0
    except LoraMoeError as error:
        message = f"{type(error).__name__}: {error}"
        plain_console(stderr=True).out(message, style="red", highlight=False)
        return 2
    except KeyboardInterrupt as interrupt:
        plain_console(stderr=True).out(str(interrupt) or "interrupted", highlight=False)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lora-moe-jax", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
