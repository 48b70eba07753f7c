"""x of a product of one row, normed by each of its programs.

A norm of one row is a kernel that takes a launch, and less than W takes to come. Here every program
norms the row for itself, while its first stages are on their way; one stores it for others.

The tensor cores take tiles of 8 rows, of which this is the first: in one of 64 columns its 128
bytes are where they would be without a swizzle. What the other rows hold goes to columns of the
sums that nobody stores.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import overlaid
from pallas_kernels.hopper.rehearsal import if_real, rehearsed
from pallas_kernels.hopper.rows import layout_of_row
from pallas_kernels.layered import as_stack
from pallas_kernels.row_reduce.mosaic_gpu import scale_of, scaled, total_of

COLUMNS, ROWS = 64, 8  # of a tile
UNIT = 1024  # columns that the threads of a warpgroup have together, 8 each
# [16 n, 64] in the order of a row in `layout_of_row`.
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((16, COLUMNS), (4, COLUMNS), (8,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


class Norm(NamedTuple):
    """What is normed: x [1, K], or the sum of it and more.

    Attributes:
      weight: [K] in x's dtype; it may be `Layered`.
    """

    x: jax.Array
    more: jax.Array | None
    weight: jax.Array
    eps: float

    @property
    def parts(self) -> tuple[jax.Array, ...]:
        return (self.x,) if self.more is None else (self.x, self.more)

    def operands(self):
        """Rows and weights of the kernel, [K] and in tiles' columns."""
        whole = [*(its.reshape(-1) for its in self.parts), as_stack(self.weight)]
        return whole, [its.reshape(*its.shape[:-1], -1, COLUMNS) for its in whole]


def normed_bytes(columns: int) -> int:
    """Of shared memory, for a row."""
    return columns * 2 * ROWS


def scratch_of(columns: int, dtype, interpreted: bool):
    """One memory: plain, and as the tensor cores read it."""
    tiles = columns // COLUMNS, ROWS, COLUMNS
    tiled = plgpu.TilingTransform((ROWS, COLUMNS)), plgpu.SwizzleTransform(2 * COLUMNS)
    plain = plgpu.SMEM((tiles[0], ROWS * COLUMNS), dtype)
    return overlaid([plain, plgpu.SMEM(tiles, dtype, transforms=tiled)], interpreted=interpreted)


def make_row(operands, eps: float, layer, target, *, results, stores, wait=None, interpreted: bool):
    """Norms the row, all of a warpgroup.

    Args:
      operands: references, see `Norm`. layer: of the weight.
      target: the plain view of the memory. results: references [1, K] to the sum if there is one,
        and the row normed. stores: whether this program writes them.
      wait: waits for the row, if it is not there when this warpgroup starts.
    """
    (*parts, weights), (*tiled_parts, tiled_weights) = operands
    layout = layout_of_row(weights.shape[-1], weights.dtype)
    load = functools.partial(plgpu.load, layout=layout)
    load_tiled = functools.partial(plgpu.load, layout=LAYOUT, optimized=False)
    weight, tiled_weight = load(weights.at[layer]), load_tiled(tiled_weights.at[layer])

    def row():
        if wait is not None:
            wait()
        return total_of(*map(load, parts)), total_of(*map(load_tiled, tiled_parts))

    def make(turn, is_real):
        del turn
        x, tiled = if_real(is_real, row, (weight, tiled_weight))
        scale = scale_of(x, eps)
        _store_tiles(target, scaled(tiled, scale, tiled_weight), interpreted)
        plgpu.commit_smem()

        @pl.when(stores & is_real)
        def _store():
            *sums, normed = results
            for its in sums:
                its.at[0][...] = x
            normed.at[0][...] = scaled(x, scale, weight)

    rehearsed(wait is not None, 1, layer, make)


def _store_tiles(target, values, interpreted: bool):
    """Stores [n, 64] as the first rows of tiles."""
    if interpreted:
        target.at[:, 0][...] = values
        return

    # Said in so many words: where it may choose, the compiler takes a swizzle.
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def store(context, rows, values):
        del context
        values.store_untiled(rows, swizzle=16, optimized=False)

    store(target.at[:, pl.ds(0, COLUMNS)], values)
