"""u made in the kernel of its product, by the programs for which that has no tiles.

A dense layer of few rows is less than a tile for each program, and its shrink, as a kernel of its
own, is over when it has hardly begun. Together one's loads hide the other's:

    the first programs      load A, x    multiply, store u, say so
    those with tiles        load W, x    multiply ...              wait, load u and B    add u·B

u goes through memory, as all programs need all of it. A program that has made some of it says so
once, and before the low-rank steps of its first tile a program waits for all that make any, whether
the tile has an adapter or not: who waits is counted. Programs begin in order, and who makes u waits
for nobody: so they need not all be there at once.
"""

from __future__ import annotations

import functools

from jax.experimental import pallas as pl

from pallas_kernels.grouped_lora_matmul.gpu_shrink import Shrinker, for_blocks
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import ShrinkLayout
from pallas_kernels.hopper.arrivals import Made


class ShrinkBeside:
    """The shrink of one program.

    Args:
      program: its number in the grid.
      rows: references to x, the place and run end of each row, and u.
      a, scalings: of each term. scratch: the shrink's.
      arrivals: a word, see `Made`. waits: how many programs wait, each once.
    """

    def __init__(
        self, layout: ShrinkLayout, program, layer, rows, a, scalings, scratch, arrivals, waits: int
    ):
        x, place, run_end, u = rows
        self.makers = min(layout.schedule.programs, layout.units)
        self.makes_some = program < self.makers
        self.shrinker = Shrinker(layout, layer, x, a, scalings, u, **scratch)
        self.for_runs = functools.partial(for_blocks, layout, program, place, run_end)
        # The interpreter knows no waiting, and runs programs one after the other.
        self.made = None
        if not layout.interpreted:
            self.made = Made(arrivals, 0, None, says=self.makers, waits=waits)

    def load(self, wait_for_x):
        """`wait_for_x` as in `Shrinker.load_run`."""

        @pl.when(self.makes_some)
        def _load():
            self.for_runs(functools.partial(self.shrinker.load_run, wait_for_x=wait_for_x))

    def compute(self):
        @pl.when(self.makes_some)
        def _make():
            self.for_runs(self.shrinker.compute_run)
            if self.made:
                self.made.say(0, is_last=True)

    def wait(self):
        """Until all of u is in memory."""
        if self.made:
            self.made.wait(0, is_first=True)
