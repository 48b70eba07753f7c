"""A progress bar on stderr, for work that takes long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """One task of a progress display."""

    def __init__(self, display: Progress, title: str):
        self._display = display
        self._task = display.add_task(title, total=None)

    def update(self, done: int, total: int) -> None:
        """Shows `done` of `total`."""
        self._display.update(self._task, completed=done, total=total)


@contextlib.contextmanager
def progress_bar(title: str, *, shown: bool) -> Iterator[Bar]:
    """Shows a bar while the block runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    display = Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), disable=not shown
    )
    with display:
        yield Bar(display, title)
