"""The terminal of the commands."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """Shows text as it is: `x[a:b:c]` of a program, or of a path, has no emoji in it."""
    return Console(emoji=False, stderr=stderr)


def wide_console() -> Console:
    """Tables have a dozen columns: room for them where no terminal sets the width."""
    console = plain_console()
    return console if console.is_terminal else Console(emoji=False, width=180)
