"""Lays rows out in the order of the route: y[position[t, c]] = x[t], by the copy engine.

Each row of x is read once, and stored once for each of its token's choices.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_rows import slot_of
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.machine import PROGRAMS, SHARED_MEMORY

WIDEST = 128  # elements of a line of a row: a copy's box may not be wider than 256,
MOST_LINES = 256  # nor have more lines
MOST_STAGES = 8
MAX_WIDTH = 32768  # of a row: of wider ones there is no second stage
COPY_UNIT = 128  # bytes of shared memory that a copy begins at a multiple of


def spread_rows(x, position):
    """Rows of x where their choices are.

    Args:
      x: [T, K], K a multiple of 8 and at most MAX_WIDTH. position: int32 [T, choices], each row
        of the result once.

    Returns:
      [T * choices, K].
    """
    layout = SpreadLayout(x, position.shape[1], SHARED_MEMORY)
    kernel = kept_kernel(
        functools.partial(_body, layout),
        out_type=layout.result,
        grid=(layout.programs,),
        grid_names=("program",),
        scratch_types=layout.scratch(),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"lora_spread_k{layout.width}",
    )
    return kernel(layout.lines_of(x), position.reshape(-1)).reshape(layout.rows, layout.width)


class SpreadLayout:
    """Sizes of rows that are spread, and their memory.

    Args:
      x: [T, K]. choices: of each token. free: bytes of shared memory that stages may take.
    """

    def __init__(self, x, choices: int, free: int):
        self.dtype, self.choices = x.dtype, choices
        self.tokens, self.width = x.shape
        self.rows = self.tokens * choices
        self.line = math.gcd(self.width, WIDEST)
        self.lines = self.width // self.line
        self.programs = min(PROGRAMS, self.tokens)
        # Of shared memory: every stage, which a copy fills, begins at a multiple of its unit.
        bytes_of_line = self.line * x.dtype.itemsize
        lines_of_unit = max(1, COPY_UNIT // bytes_of_line)
        self.stage_lines = -(-self.lines // lines_of_unit) * lines_of_unit
        self.stages = min(MOST_STAGES, free // (self.stage_lines * bytes_of_line))

    @property
    def parts(self) -> list:
        """A row's lines, as copies take them."""
        starts = range(0, self.lines, MOST_LINES)
        return [pl.ds(at, min(MOST_LINES, self.lines - at)) for at in starts]

    def lines_of(self, x) -> jax.Array:
        return x.reshape(-1, self.lines, self.line)

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.lines, self.line), self.dtype)

    def scratch(self) -> dict:
        return dict(
            stage_of_row=plgpu.SMEM((self.stages, self.stage_lines, self.line), self.dtype),
            stage_full=plgpu.Barrier(num_arrivals=len(self.parts), num_barriers=self.stages),
        )


def _body(layout: SpreadLayout, x, position, y, **scratch):
    wait_for_kernels_before(layout.rows)
    spread(layout, lax.axis_index("program"), x, position, None, y, **scratch)


class Bare(NamedTuple):
    """Rows without an adapter, where others lay out the rest.

    Attributes:
      place: of each row, see `gpu_rows.Tables`. count: [1], how many rows have no adapter.
    """

    place: jax.Array
    count: jax.Array


def spread(
    layout: SpreadLayout, program, x, position, bare: Bare | None, y, *, stage_of_row, stage_full
) -> None:
    """A program's part of it, by one warpgroup.

    Args:
      x, y: in lines. bare: only these rows are stored. None: all are.
    """
    stages, choices = layout.stages, range(layout.choices)
    mine = lax.div(layout.tokens - program + (layout.programs - 1), jnp.int32(layout.programs))
    loaded = jnp.minimum(mine, stages - 1)

    def token_of(i):
        return program + i * layout.programs

    def load(i):
        stage = lax.rem(i, jnp.int32(stages))
        for part in layout.parts:
            copy = stage_of_row.at[stage, part], stage_full.at[stage]
            plgpu.copy_gmem_to_smem(x.at[token_of(i), part], *copy)

    def rows_of(i):
        token = jnp.minimum(token_of(i), layout.tokens - 1)
        return [position[token * layout.choices + choice] for choice in choices]

    def are_mine(rows):
        return [None if bare is None else slot_of(bare.place[row]) < 0 for row in rows]

    def unit(i, state):
        """What is read of two tokens that follow is read ahead, one after the other."""
        *found, next_rows = state
        stage = lax.rem(i, jnp.int32(stages))
        following = next_rows, are_mine(next_rows), rows_of(i + 2)
        plgpu.barrier_wait(stage_full.at[stage])

        def store(row):
            for part in layout.parts:
                plgpu.copy_smem_to_gmem(
                    stage_of_row.at[stage, part], y.at[row, part], commit_group=False
                )

        for row, is_mine in zip(*found, strict=True):
            if is_mine is None:
                store(row)
            else:
                pl.when(is_mine)(functools.partial(store, row))
        plgpu.commit_smem_to_gmem_group()

        @pl.when(i + (stages - 1) < mine)
        def _next():
            # The stage before this one is stored: all but this token's stores have read.
            wait_for_all_but = functools.partial(plgpu.wait_smem_to_gmem, wait_read_only=True)
            if bare is None:
                wait_for_all_but(1)
            else:
                # The interpreter knows no group without copies.
                stores = functools.reduce(jnp.logical_or, found[1])
                lax.cond(stores, lambda: wait_for_all_but(1), lambda: wait_for_all_but(0))
            load(i + (stages - 1))

        return following

    lax.fori_loop(0, loaded, lambda i, _: load(i), None)
    first = rows_of(0)
    start = first, are_mine(first), rows_of(1)

    def store_all():
        lax.fori_loop(0, mine, unit, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    if bare is None:
        store_all()
        return
    pl.when(bare.count[0] > 0)(store_all)

    @pl.when(bare.count[0] == 0)
    def _let_come():
        lax.fori_loop(0, loaded, lambda i, _: plgpu.barrier_wait(stage_full.at[i]), None)
