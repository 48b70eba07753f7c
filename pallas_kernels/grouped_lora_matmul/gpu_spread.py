"""Lays rows out in the order of the route: y[position[t, c]] = x[t], by the copy engine.

Each row of x is read once, and stored once for each of its token's choices. For few rows the same
kernel also lays out what the other kernels need to know about them: there launches cost most.
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

from pallas_kernels.grouped_lora_matmul.gpu_rows import Listing, Route, group_of, route_of_listing
from pallas_kernels.grouped_lora_matmul.gpu_schedule import (
    TILE_WORDS,
    tile_height,
    tiles_together,
)
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
    return _spread(x, position, None)[0]


def spread_listed(x, listing: Listing, choices: int) -> tuple[Route, jax.Array]:
    """The route of a listing, and rows of x in its order."""
    position = listing.position.reshape(-1, choices)
    rows, *laid_out = _spread(x, position, listing)
    return route_of_listing(position, listing.groups, *laid_out), rows


class _Row(NamedTuple):
    """What a listing knows of one row."""

    place: object
    run_end: object
    begin: object
    end: object
    tile: object


def _spread(x, position, listing: Listing | None):
    """The rows; of a listing also token, place, run_end, words and count, in the new order."""
    tokens, choices = position.shape
    rows, width = tokens * choices, x.shape[1]
    line = math.gcd(width, WIDEST)
    lines = width // line
    # Of shared memory: every stage, which a copy fills, begins at a multiple of its unit.
    lines_of_unit = max(1, COPY_UNIT // (line * x.dtype.itemsize))
    stage_lines = -(-lines // lines_of_unit) * lines_of_unit
    stages = min(MOST_STAGES, SHARED_MEMORY // (stage_lines * line * x.dtype.itemsize))
    programs = min(PROGRAMS, tokens)
    parts = [pl.ds(at, min(MOST_LINES, lines - at)) for at in range(0, lines, MOST_LINES)]

    def body(x, position, *refs, stage_of_row, full):
        if listing is None:
            (y,) = refs
        else:
            lists, (y, *laid_out) = refs[:5], refs[5:]
        program = lax.axis_index("program")
        mine = lax.div(tokens - program + (programs - 1), jnp.int32(programs))

        def load(i):
            stage = lax.rem(i, jnp.int32(stages))
            token = program + i * programs
            for part in parts:
                plgpu.copy_gmem_to_smem(
                    x.at[token, part], stage_of_row.at[stage, part], full.at[stage]
                )

        def unit(i, carry):
            stage, token = lax.rem(i, jnp.int32(stages)), program + i * programs
            places = [position[token * choices + choice] for choice in range(choices)]
            if listing is not None:
                # All are read before any is written, so that one trip to memory brings them.
                own = [
                    _Row(*(its[token * choices + choice] for its in lists))
                    for choice in range(choices)
                ]
                for place, row in zip(places, own, strict=True):
                    _lay_out(listing.groups, rows, token, place, row, *laid_out)
            plgpu.barrier_wait(full.at[stage])
            for place in places:
                for part in parts:
                    plgpu.copy_smem_to_gmem(
                        stage_of_row.at[stage, part], y.at[place, part], commit_group=False
                    )
            plgpu.commit_smem_to_gmem_group()

            @pl.when(i + (stages - 1) < mine)
            def _next():
                # The stage before this one is stored: all but the newest store have read.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                load(i + (stages - 1))

            return carry

        lax.fori_loop(0, jnp.minimum(mine, stages - 1), lambda i, c: (load(i), c)[1], 0)
        lax.fori_loop(0, mine, unit, 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    outputs = [jax.ShapeDtypeStruct((rows, lines, line), x.dtype)]
    inputs = [x.reshape(-1, lines, line), position.reshape(-1)]
    if listing is not None:
        inputs += [listing.place, listing.run_end, listing.begin, listing.end, listing.tile]
        sizes = (rows, rows, rows, listing.tiles * TILE_WORDS, 1)
        outputs += [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]
    kernel = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=dict(
            stage_of_row=plgpu.SMEM((stages, stage_lines, line), x.dtype),
            full=plgpu.Barrier(num_arrivals=len(parts), num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"lora_spread{'' if listing is None else '_listed'}_k{width}",
    )
    spread, *laid_out = kernel(*inputs)
    return spread.reshape(rows, width), *laid_out


def _lay_out(groups, rows, token, position, row: _Row, tokens, place, run_end, words, count):
    """Writes what is known of a row to its place, and its tile's words if it is the first there."""
    height, together = tile_height(rows, groups), tiles_together(rows, groups)
    tokens[position] = token
    place[position] = row.place
    run_end[position] = row.run_end

    def write(tile, first, count, group):
        for word, value in enumerate((first, count, group)):
            words[tile * TILE_WORDS + word] = value

    @pl.when(lax.rem(position - row.begin, jnp.int32(height)) == 0)
    def _words():
        size = jnp.minimum(row.end - position, height)
        write(row.tile - 1, position, size, group_of(row.place))

    @pl.when(position == rows - 1)
    def _count():
        whole = lax.div(row.tile + (together - 1), jnp.int32(together)) * together
        count[0] = whole
        for more in range(together - 1):
            unused = functools.partial(write, row.tile + more, 0, 0, groups)
            pl.when(row.tile + more < whole)(unused)
