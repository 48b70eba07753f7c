"""The sums of a split of a sequence, and what a consumer of the Hopper kernel does with them."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.rolled import rolled
from pallas_kernels.hopper.store import store_rows
from pallas_kernels.paged_attention.gpu_join import NOTHING_TO_JOIN, factors, joined
from pallas_kernels.paged_attention.gpu_sizes import LINE, ROWS, Sizes
from pallas_kernels.paged_attention.gpu_units import Unit

PIECE = 8  # columns


class Sums(NamedTuple):
    """Over some of the positions that each row sees.

    Attributes:
      maximum: of the scores, [64]. total: of the weights of this consumer's blocks, [64].
      values: the weighted values of this consumer's columns, [64, columns of a product] each.
    """

    maximum: jax.Array
    total: jax.Array
    values: tuple[jax.Array, ...]


def no_sums(sizes: Sizes) -> Sums:
    s, of_row = sizes, plgpu.Layout.WGMMA.reduce(1)
    return Sums(
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), of_row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_row),
        tuple(
            plgpu.layout_cast(jnp.zeros((ROWS, s.value_width), jnp.float32), plgpu.Layout.WGMMA)
            for _ in range(s.own_columns // s.value_width)
        ),
    )


def sinks_of_rows(sizes: Sizes, sinks):
    """[parts, 64]: the sink of each row of a part's tiles, scaled for powers of two."""
    s = sizes
    member = np.arange(ROWS) % s.group
    return sinks.astype(jnp.float32).reshape(s.parts, s.group)[:, member] * math.log2(math.e)


def sums_of_sinks(sizes: Sizes, sinks) -> Sums:
    """Of the rows of a tile, whose sinks are given [64]: each has the weight 1, and no values."""
    of_row = plgpu.Layout.WGMMA.reduce(1)
    maximum = plgpu.load(sinks, layout=of_row, optimized=False)
    total = plgpu.layout_cast(jnp.ones((ROWS,), jnp.float32), of_row)
    return no_sums(sizes)._replace(maximum=plgpu.layout_cast(maximum, of_row), total=total)


def no_sums_to_join() -> Sums:
    """Numbers of rows that have their results: a total that no weights have. Nobody reads more."""
    of_row = plgpu.Layout.WGMMA.reduce(1)
    number = plgpu.layout_cast(jnp.full((ROWS,), NOTHING_TO_JOIN, jnp.float32), of_row)
    return Sums(number, number, ())


def lines_of(values):
    """The columns of `Sums.values`, line by line."""
    width = values[0].shape[1]
    return [its[:, first : first + LINE] for its in values for first in range(0, width, LINE)]


def columns_of(line):
    return pl.ds(pl.multiple_of(line * LINE, LINE), LINE)


def memory_of_sums(sizes: Sizes):
    """The arrays for the sums of all splits, as `join_kernel` takes them."""
    # A thread has a power of two of them when splits are joined.
    s, columns = sizes, max(2 * LINE, 1 << (sizes.value_lines * LINE - 1).bit_length())
    numbers = s.parts, s.spread, s.tokens * ROWS
    shapes = (s.parts, s.spread, s.tokens * s.rows_of_sums, columns), numbers, numbers
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def join_split(before: Sums, sums: Sums) -> Sums:
    """The sums of all splits up to this one."""
    maximum, *both = factors(before.maximum, sums.maximum)
    total = joined(before.total, both[0], sums.total, both[1])
    both = [lax.broadcast_in_dim(factor, sums.values[0].shape, [0]) for factor in both]
    pairs = zip(before.values, sums.values, strict=True)
    return Sums(maximum, total, tuple(joined(its, both[0], new, both[1]) for its, new in pairs))


def memory_before(sizes: Sizes, programs: int):
    """The array for the values before a split, of programs that have no room for them.

    A few columns of all rows follow each other there: what the threads of a warp have of them is
    whole lines of memory.
    """
    pieces = sizes.value_lines * LINE // PIECE
    return jax.ShapeDtypeStruct((programs, pieces, ROWS, PIECE), jnp.float32)


def place_of_split(sizes: Sizes, unit: Unit, split):
    """Which of `memory_of_sums` are the unit's, and a split's."""
    first = jnp.int32(0)
    if sizes.window is not None:
        first = lax.div(unit.first, jnp.int32(sizes.split))
    return unit.part, split - first


def store_split(sizes: Sizes, unit: Unit, split, sums: Sums, memory, buffer):
    """Stores a split's sums in `memory_of_sums`; lines leave through a buffer."""
    s, lines, place = sizes, memory[0], place_of_split(sizes, unit, split)
    store_numbers(s, unit, split, sums, memory)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for number, its in enumerate(lines_of(sums.values)):
        buffer.at[number][...] = its
    plgpu.commit_smem()
    row, count = unit.token * s.group, unit.tokens * s.group

    def store(line):
        store_rows(buffer.at[line], lines.at[*place], row, count, ROWS, columns_of(line))

    rolled(0, s.value_lines, row, store)


def store_numbers(sizes: Sizes, unit: Unit, split, sums: Sums, memory):
    """Stores what a split has one number of for each row."""
    _, maxima, totals = memory
    place, rows = place_of_split(sizes, unit, split), pl.ds(unit.token * ROWS, ROWS)
    maxima.at[*place, rows][...] = sums.maximum
    totals.at[*place, rows][...] = sums.total
