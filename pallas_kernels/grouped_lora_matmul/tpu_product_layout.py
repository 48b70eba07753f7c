"""Static facts of one TPU product kernel."""

from __future__ import annotations

import dataclasses

from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.tpu_schedule import ROW_ALIGN, ProductSchedule, round_up

COLUMNS = 1024  # columns of one dot or one elementwise step


@dataclasses.dataclass(frozen=True)
class Term:
    """Where one low-rank term goes.

    Attributes:
      half: 0, or 1 for up.
      start, width: the columns that its factor covers, in its half.
      kept: the part of those columns that is added; None for all of them.
    """

    half: int
    start: int
    width: int
    kept: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class ProductLayout:
    """Static facts of one kernel."""

    schedule: ProductSchedule
    contract: int
    gate: Gate | None
    terms: tuple[Term, ...]
    firsts: tuple[int, ...]
    k: int
    n: int
    halves: int
    biased: bool

    @property
    def half_stride(self) -> int:
        """Rows from gate's part of a piece to up's."""
        return self.schedule.piece if self.halves == 1 else round_up(self.schedule.piece, ROW_ALIGN)

    @property
    def piece_shape(self):
        if self.contract == 2:
            return self.halves * self.half_stride, self.k
        return self.schedule.piece, self.schedule.block_n
