"""W of a TPU product: its pieces come to a ring in VMEM, ahead of their use."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_lora_matmul.tpu_common import last_or_whole
from pallas_kernels.grouped_lora_matmul.tpu_product_layout import ProductLayout
from pallas_kernels.grouped_lora_matmul.tpu_schedule import LANES
from pallas_kernels.grouped_lora_matmul.tpu_tasks import Tasks


class Weights:
    """The ring of pieces of W. Pieces follow each other by column tile, group and part."""

    def __init__(self, layout: ProductLayout, tasks: Tasks, w, ring, arrived, core):
        self.layout, self.tasks, self.w = layout, tasks, w
        self.ring, self.arrived, self.core = ring, arrived, core
        self.groups = tasks.counts[1]
        self.tiles_of_core = layout.schedule.n_tiles // layout.schedule.cores

    def fetch_first(self):
        for piece in range(self.layout.schedule.ring):
            self._fetch(0, 0, piece, piece)

    def wait(self, j, t, piece):
        """Waits for a piece of the task's group, if its first task: afterwards it stays."""
        slot = self.slot(j, t, piece)

        @pl.when(self.tasks.edges[t] % 2 == 1)
        def _():
            self._copy(j, self.tasks.ordinal[t], piece, slot, lambda copy: copy.wait())

        return slot

    def release(self, j, t, piece):
        """After a piece's last use, its slot takes the piece that is `ring` further."""

        @pl.when(self.tasks.edges[t] >= 2)
        def _():
            ring = self.layout.schedule.ring
            self._fetch(j, self.tasks.ordinal[t], piece + ring, self.slot(j, t, piece))

    def slot(self, j, t, piece):
        s = self.layout.schedule
        sequence = (j * self.groups + self.tasks.ordinal[t]) * s.pieces + piece
        return lax.rem(sequence, s.ring)

    def _fetch(self, j, ordinal, piece, slot):
        """Starts a copy, if there is such a piece; `piece` counts from the ordinal's first."""
        s = self.layout.schedule
        ordinal = ordinal + piece // s.pieces
        piece = piece % s.pieces
        for _ in range(-(-s.ring // s.pieces)):  # with one group, each step is a column tile
            j, ordinal = (
                jnp.where(ordinal >= self.groups, j + 1, j),
                jnp.where(ordinal >= self.groups, ordinal - self.groups, ordinal),
            )

        @pl.when((j < self.tiles_of_core) & (self.groups > 0))
        def _():
            self._copy(j, ordinal, piece, slot, lambda copy: copy.start())

    def _copy(self, j, ordinal, piece, slot, act):
        """Acts on the copies of one piece, the last ones of an axis being smaller."""
        layout, s = self.layout, self.layout.schedule
        source, target, semaphore = (
            self.w.at[self.tasks.active[ordinal]],
            self.ring.at[slot],
            self.arrived.at[slot],
        )
        column_tile = self.core * self.tiles_of_core + j
        # Of one alone it is known: W may have fewer rows than a piece, and none is whole then.
        last_piece = s.pieces == 1 or piece == s.pieces - 1
        last_tile = s.n_tiles == 1 or column_tile == s.n_tiles - 1

        def forward(rows):
            start = column_tile * s.block_n + piece * s.piece
            for half in range(layout.halves):
                part, place = source.at[half], target
                if rows < layout.n:
                    part = part.at[pl.ds(start, rows)]
                if rows < target.shape[0]:
                    place = target.at[pl.ds(half * layout.half_stride, rows)]
                act(pltpu.make_async_copy(part, place, semaphore))

        def backward(rows, columns):
            part, place = source, target
            if (rows, columns) != (layout.k, layout.n):
                start = pl.multiple_of(column_tile * s.block_n, LANES) if s.n_tiles > 1 else 0
                part = source.at[pl.ds(piece * s.piece, rows), pl.ds(start, columns)]
            if (rows, columns) != target.shape:
                place = target.at[pl.ds(0, rows), pl.ds(0, columns)]
            act(pltpu.make_async_copy(part, place, semaphore))

        if layout.contract == 2:
            last = last_piece if s.n_tiles == 1 else last_tile & last_piece
            last_or_whole(last, layout.n % s.piece or s.piece, s.piece, forward)
            return

        def with_rows(rows):
            rest = layout.n % s.block_n or s.block_n
            last_or_whole(last_tile, rest, s.block_n, functools.partial(backward, rows))

        last_or_whole(last_piece, layout.k % s.piece or s.piece, s.piece, with_rows)
