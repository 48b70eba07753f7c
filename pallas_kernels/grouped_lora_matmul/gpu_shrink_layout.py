"""The sizes of one Hopper shrink kernel, and its shared memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_classes import rank_classes
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import (
    SHRINK_STEPS,
    memory_beside_shrink,
    packed_columns,
    ranks_of_stage,
    stage_of_shrink,
)
from pallas_kernels.hopper import gather
from pallas_kernels.hopper.memory import overlaid, two_views
from pallas_kernels.hopper.store import transforms_of_lines
from pallas_kernels.layered import is_layered, merged


def widest_ranks(factors, classes: int) -> tuple[int, ...]:
    """The largest rank of each part, of terms class by class."""
    ranks = [factor.shape[2] for factor in factors]
    parts = len(ranks) // classes
    return tuple(max(ranks[part::parts]) for part in range(parts))


class Span(NamedTuple):
    """Columns of x, and what is multiplied with them.

    Attributes:
      start, width: in columns of x. parts: whose they are.
      low: the first block of 64 of the unit's ranks that has ranks of these parts.
      ranks: from that block's first to the last of these.
      together: its steps are a multiple of so many; those past its width add zeros.
    """

    start: int
    width: int
    parts: list[int]
    low: int
    ranks: int
    together: int = 1

    @property
    def blocks(self) -> int:
        """How many blocks of 64 have ranks of these parts."""
        return pl.cdiv(self.ranks, 64)

    @property
    def k_steps(self) -> int:
        return pl.cdiv(self.width, 64 * SHRINK_STEPS * self.together) * self.together


class ShrinkLayout:
    """Sizes of one shrink, and its memory.

    Args:
      gatherers: warpgroups that store x in the stages; 0: the copy engine does.
    """

    def __init__(
        self, x, factors, scalings, firsts, starts, schedule, interpreted, gatherers: int = 0
    ):
        self.interpreted, self.gatherers = interpreted, gatherers
        self.schedule, self.dtype = schedule, x.dtype
        self.rows = x.shape[0]
        self.terms, self.classes = len(factors), rank_classes(firsts)
        self.parts = self.terms // len(firsts)
        self.ranks = widest_ranks(factors, len(firsts))
        self.groups = tuple(factor.shape[1] for factor in factors)
        self.scaling_groups = tuple(s.shape[1] for s in scalings)
        # Slots, and scalings, of a layer, where an array has those of many.
        self.slots_of_layer = tuple(merged(factor)[1] for factor in factors)
        self.scalings_of_layer = tuple(math.prod(s.shape) * is_layered(s) for s in scalings)
        self.layered = any(map(is_layered, (*factors, *scalings)))
        # Where the ranks of a part are among those that a unit multiplies.
        self.first, self.owned = packed_columns(self.ranks, schedule.rank_tile)
        if schedule.apart:
            self.first = (0,) * self.parts
        self.blocks = pl.cdiv(max(map(sum, zip(self.first, self.owned, strict=True))), 64)
        self.parts_apart = self.parts if schedule.apart else 1
        self.columns = 64 * self.blocks * self.parts_apart
        widths = [factor.shape[3] for factor in factors[: self.parts]]
        self.spans = self.spans_of(list(zip(starts, widths, strict=True)))
        if schedule.apart and len(self.spans) > 1:
            raise ValueError("parts of different columns cannot be units of their own")
        self.k_steps = sum(span.k_steps for span in self.spans)
        # Of a stage's A, for each of its blocks of columns. Products read whole blocks of 64: past
        # the last rank they multiply what is there for nothing.
        self.a_ranks = max(span.ranks for span in self.spans)
        (parts_of_span,) = {len(span.parts) for span in self.spans}
        self.parts_loaded = 1 if schedule.apart else parts_of_span
        self.units = pl.cdiv(self.rows, schedule.block or 1) * self.parts_apart

    def spans_of(self, columns) -> list[Span]:
        spans = []
        for start, width in dict.fromkeys(columns):
            parts = [part for part, its in enumerate(columns) if its == (start, width)]
            low = min(self.first[part] for part in parts) // 64
            end = max(self.first[part] + self.owned[part] for part in parts)
            together = gather.TOGETHER if self.gatherers else 1
            spans.append(Span(start, width, parts, low, end - 64 * low, together))
        return spans

    @property
    def bytes(self) -> int:
        """Of shared memory, barriers apart."""
        s = self.schedule
        height, stages = s.heights[-1], s.stages
        return stages * stage_of_shrink(height, self.a_ranks) + memory_beside_shrink(height)

    def name(self):
        classes = f"_c{len(self.classes)}" if len(self.classes) > 1 else ""
        width = sum(span.width for span in self.spans)
        return f"lora_shrink_r{max(self.ranks)}_k{width}_x{self.parts}{classes}"

    def column_of(self, part):
        """Where u of a part starts."""
        return self.first[part] + (64 * self.blocks * part if self.schedule.apart else 0)

    @property
    def first_columns(self) -> list[int]:
        """Where u of each term starts."""
        return [self.column_of(term % self.parts) for term in range(self.terms)]

    def terms_of(self, part):
        """(class, term) of each class of a part."""
        return zip(self.classes, range(part, self.terms, self.parts), strict=True)

    def scratch(self):
        stages = zip(("x_stage", "a_stage"), self.stage_views(), strict=True)
        rings = {name: overlaid(its, interpreted=self.interpreted) for name, its in stages}
        return rings | self.scratch_beside()

    def stage_views(self):
        """Those of the stages of x, and of A."""
        s = self.schedule
        x_shape = (s.stages, SHRINK_STEPS, s.heights[-1], 64)
        a_shape = (s.stages, ranks_of_stage(self.a_ranks), 64)
        return two_views(x_shape, self.dtype), two_views(a_shape, self.dtype)

    def scratch_beside(self):
        """What is not in the stages."""
        s = self.schedule
        return dict(
            out=plgpu.SMEM(
                (2, s.heights[-1], 64), self.dtype, transforms=transforms_of_lines(self.dtype)
            ),
            full=plgpu.Barrier(
                num_arrivals=SHRINK_STEPS * self.parts_loaded + (self.gatherers or SHRINK_STEPS),
                num_barriers=s.stages,
            ),
            empty=plgpu.Barrier(num_arrivals=1, num_barriers=s.stages),
        )
