"""u made in the kernel of its product by all of its programs, before their tiles.

Where every program has tiles nobody is free to make u beside them (`gpu_product_beside`). But as a
kernel of its own a shrink of few rows is a launch, and no more where no row has an adapter; and
memory rests while one kernel ends and the next one begins:

    load A, x                          load W, x                 wait, load u and B
              multiply, store u, say so          multiply ...                       add u·B

Stages of both lie in one ring, one after the other. u goes through memory: before the low-rank
steps of its first tile a program waits for all that make any, which was some K loop ago. Who makes
u waits for nobody, but all programs have to run at once, or those that wait would be where those
they wait for should run.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_lora_matmul.gpu_rows import slot_of
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Shrinker, for_blocks
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import ShrinkLayout
from pallas_kernels.hopper.arrivals import Made
from pallas_kernels.hopper.memory import drain


def makers(layout: ShrinkLayout) -> int:
    """How many programs make u: the first ones."""
    return min(layout.schedule.programs, layout.units)


class ShrinkAhead:
    """The shrink of one program.

    Args:
      rows: references to x, the place and run end of each row, and u.
      a, scalings: of each term. scratch: the shrink's.
      made: says that all of u is in memory, and waits for that.
    """

    def __init__(
        self,
        layout: ShrinkLayout,
        program,
        layer,
        rows,
        a,
        scalings,
        scratch,
        made: Made,
    ):
        x, self.place, run_end, u = rows
        self.layout, self.program, self.made = layout, program, made
        self.makes_some = program < makers(layout)
        self.shrinker = Shrinker(layout, layer, x, a, scalings, u, **scratch)
        self.for_runs = functools.partial(for_blocks, layout, program, self.place, run_end)

    def load(self):
        """For the warpgroup that loads: when it returns stages are free."""

        def load():
            return self.for_runs(self.shrinker.load_run)

        steps = lax.cond(self.has_adapters(), load, lambda: jnp.int32(0))
        drain(self.shrinker.empty, steps, self.layout.schedule.stages)

    def compute(self):
        """For one that multiplies."""

        @pl.when(self.has_adapters())
        def _make():
            self.for_runs(self.shrinker.compute_run)

        pl.when(self.makes_some)(lambda: self.made.say(0, is_last=True))

    def wait(self):
        """Until all of u is in memory. To be called once by each program."""
        # In the interpreter programs run one after the other, and the first makes all of u.
        waits = self.program == 0 if self.layout.interpreted else True
        self.made.wait(0, waits)

    def has_adapters(self):
        """Whether any row of the program's units has one. Words that are all read at once: walking
        through units waits for each."""
        layout, s = self.layout, self.layout.schedule
        slots = []
        for turn in range(pl.cdiv(layout.units, s.programs)):
            unit = lax.div(self.program + turn * s.programs, jnp.int32(layout.parts_apart))
            for row in range(s.block):
                place = self.place[jnp.minimum(unit * s.block + row, layout.rows - 1)]
                slots.append(slot_of(place))
        return self.makes_some & (functools.reduce(jnp.maximum, slots) >= 0)
