"""u of down, made in the kernel of the experts while gate and up of other rows are multiplied.

Two warpgroups beside those of the products, with a ring of their own, take the tiles of rows one by
one: as soon as all of h of a tile is in memory they make its u, and say so. Programs come to down
long after, so nobody waits for it.

    load W of gate and up  ...          load W of down, h, u, B  ...
    multiply, store h, say so  ...      multiply, store  ...
        wait for h, load A, h  ...      (wait for u)
        multiply, store u, say so  ...
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILE_WORDS
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Shrinker, for_units
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import ShrinkLayout
from pallas_kernels.hopper.arrivals import Made
from pallas_kernels.hopper.memory import views_of


class ShrinkOfTiles:
    """The shrink of one program, which has every `programs`-th tile of rows.

    Args:
      rows: how many tiles there are, and references to their words, and to the place and the run
        end of each row.
      arrays: references to h and u, and lists of those to the factors and scalings of each term.
      scratch: the shrink's.
      h_made, u_made: who says, and who is told, that a tile's rows are in memory.
    """

    WAITS = 2  # for h of each tile

    def __init__(
        self,
        layout: ShrinkLayout,
        program,
        layer,
        rows,
        arrays,
        scratch,
        h_made: Made,
        u_made: Made,
    ):
        (count, words, place, run_end), (h, u, factors, scalings) = rows, arrays
        self.program, self.programs = program, layout.schedule.programs
        views = {
            f"{name}_views": views_of(scratch[f"{name}_stage"], 2, interpreted=layout.interpreted)[
                0
            ]
            for name in ("x", "a")
        }
        others = {name: scratch[name] for name in ("out", "full", "empty")}
        self.shrinker = Shrinker(layout, layer, h, factors, scalings, u, **views, **others)
        self.h_made, self.u_made = h_made, u_made
        units = lax.div(count - program + (self.programs - 1), jnp.int32(self.programs))
        last = words.shape[0] // TILE_WORDS - 1

        def rows_of(i):
            first = jnp.minimum(self.number(i), last) * TILE_WORDS
            return jnp.int32(0), words[first], words[first] + words[first + 1]

        self.units = units
        self.for_runs = functools.partial(for_units, units, rows_of, place, run_end)

    def number(self, i):
        """That of the program's i-th tile in the table."""
        return self.program + i * self.programs

    def load(self):
        self.for_runs(self.shrinker.load_run, begin=self.wait)

    def compute(self):
        def end(i):
            self.u_made.say(self.number(i), i == self.units - 1)

        # It waits too: of rows without adapters it says that there is u, and h with it, at once.
        self.for_runs(self.shrinker.compute_run, begin=self.wait, end=end)

    def wait(self, i):
        self.h_made.wait(self.number(i), i == 0)
