"""The terminal of the commands that print wide tables."""

from __future__ import annotations

from rich.console import Console


def wide_console() -> Console:
    """Tables have a dozen columns: room for them where no terminal sets the width."""
    console = Console()
    return console if console.is_terminal else Console(width=180)
