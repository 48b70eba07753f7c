"""What the sections of `bench kernels` share: jobs to run, rows they give, cells of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

STYLES = {"aim": "green", "must": "yellow", "MISS": "red"}


class Job(NamedTuple):
    """One measurement of a section: its label in the progress bar, and what returns its rows."""

    label: str
    run: Callable[[], list[Any]]


def microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def us_cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def ratio_cell(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def verdict_cell(verdict: str) -> str:
    style = STYLES.get(verdict)
    return f"[{style}]{verdict}[/]" if style else verdict


def verdict_of_more(value: float | None, must: float | None, aim: float | None) -> str:
    """What a number is that should be large; none without a number or a target."""
    if value is None or must is None or aim is None:
        return ""
    return "aim" if value >= aim else "must" if value >= must else "MISS"
