"""A run that Ctrl-C ends between its steps, so that what is kept of it is of whole ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

from lora_moe_jax.serving.interrupts import uninterrupted

Report = TypeVar("Report")


class WholeSteps(Generic[Report]):
    """The reports of a run, one for each step; Ctrl-C within `with` ends the block.

    It comes after the step that is under way. The first one it ends at once, as that compiles and
    there is nothing to keep: then, and only then, KeyboardInterrupt leaves the block.

    Attributes:
      reports: of the steps that have ended.
      interrupted: whether Ctrl-C has ended the block.
    """

    def __init__(self, run: Iterator[Report]):
        self._run = run
        self.reports: list[Report] = []
        self.interrupted = False

    def __iter__(self) -> Iterator[Report]:
        while True:
            with uninterrupted() if self.reports else contextlib.nullcontext():
                report = next(self._run, None)
                if report is None:
                    return
                self.reports.append(report)
            yield report

    def __enter__(self) -> WholeSteps[Report]:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        self.interrupted = isinstance(error, KeyboardInterrupt)
        return self.interrupted and bool(self.reports)
