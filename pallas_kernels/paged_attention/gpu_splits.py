"""The sums of a split of a sequence, and what a consumer of the Hopper kernel does with them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.store import store_rows, whole_lines
from pallas_kernels.paged_attention.gpu_join import factors, joined
from pallas_kernels.paged_attention.gpu_sizes import LINE, ROWS, Sizes
from pallas_kernels.paged_attention.gpu_units import Unit


class Sums(NamedTuple):
    """Over some of the positions that each row sees.

    Attributes:
      maximum: of the scores, [64]. total: of the weights of this consumer's blocks, [64].
      lines: of the weighted values, [64, 64] each.
    """

    maximum: jax.Array
    total: jax.Array
    lines: tuple[jax.Array, ...]


def no_sums(sizes: Sizes) -> Sums:
    of_row = plgpu.Layout.WGMMA.reduce(1)
    return Sums(
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), of_row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_row),
        tuple(
            plgpu.layout_cast(jnp.zeros((ROWS, LINE), jnp.float32), plgpu.Layout.WGMMA)
            for _ in range(sizes.value_lines // sizes.consumers)
        ),
    )


def memory_of_sums(sizes: Sizes):
    """The arrays for the sums of all splits, as `join_kernel` takes them."""
    s, columns = sizes, whole_lines(sizes.value_lines * LINE, LINE)
    columns += columns % (2 * LINE)
    numbers = s.parts, s.spread, s.tokens * ROWS
    shapes = (s.parts, s.spread, s.tokens * s.group, columns), numbers, numbers
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def join_split(before: Sums, sums: Sums) -> Sums:
    """The sums of all splits up to this one."""
    maximum, *both = factors(before.maximum, sums.maximum)
    total = joined(before.total, both[0], sums.total, both[1])
    both = [lax.broadcast_in_dim(factor, (ROWS, LINE), [0]) for factor in both]
    pairs = zip(before.lines, sums.lines, strict=True)
    return Sums(maximum, total, tuple(joined(line, both[0], its, both[1]) for line, its in pairs))


def store_split(sizes: Sizes, unit: Unit, split, sums: Sums, memory, buffer):
    """Stores a split's sums in `memory_of_sums`; lines leave through a buffer."""
    s, (lines, maxima, totals) = sizes, memory
    first = jnp.int32(0) if s.window is None else lax.div(unit.first, jnp.int32(s.split))
    place, rows = (unit.part, split - first), pl.ds(unit.token * ROWS, ROWS)
    maxima.at[*place, rows][...] = sums.maximum
    totals.at[*place, rows][...] = sums.total
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for number, its in enumerate(sums.lines):
        buffer.at[number][...] = its
    plgpu.commit_smem()
    row, count = unit.token * s.group, unit.tokens * s.group
    for number in range(s.value_lines):
        columns = pl.ds(number * LINE, LINE)
        store_rows(buffer.at[number], lines.at[*place], row, count, ROWS, columns)
