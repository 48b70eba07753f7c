"""Heads of a token in the registers of a warpgroup: normed, and rotated.

In the registers' layout of the tensor cores a thread has the same columns of both halves of a head,
which are rotated with each other, and four threads have a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.head_rotation.triton import stacked_weights
from pallas_kernels.hopper.row_sums import row_sums
from pallas_kernels.layered import layer_operands, number_of

WIDTH, HALF = 128, 64
COLUMNS = pl.ds(0, HALF), pl.ds(HALF, HALF)  # of each half


class Heads(NamedTuple):
    """So many rows, each of a head, in the registers of a warpgroup.

    A row's sums are made in the same order in both layouts, see `hopper.row_sums`: each has four
    threads for a row.
    """

    count: int
    layout: Any

    @property
    def shape(self):
        return self.count, HALF

    def over_columns(self, ref):
        """A vector of half a head's features, to be repeated over rows."""
        return plgpu.load(ref, layout=self.layout.reduce(0), optimized=False)

    def loaded(self, stage):
        """Both halves of heads, in float32."""
        rows = pl.ds(0, self.count)
        return [self._load(stage.at[half, rows]).astype(jnp.float32) for half in (0, 1)]

    def nothing(self):
        """Zeros in place of both halves."""
        return [plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)] * 2

    def _load(self, ref):
        return plgpu.load(ref, layout=self.layout, optimized=self.layout is plgpu.Layout.WGMMA)

    def weights_of_layer(self, norms):
        """Those of queries and of keys, for each half of the columns; see `norm_operands`."""
        if norms is None:
            return None
        layer, *weights = norms
        number = number_of(layer)
        return [[self.over_columns(its.at[number, half]) for its in weights] for half in COLUMNS]

    def normed_and_rotated(
        self, halves, weights, angles, q_heads: int, eps: float, *, interpreted: bool
    ):
        """Both halves of heads, normed if there are weights, and rotated; all in float32.

        Args:
          weights: those of `weights_of_layer`. angles: cosines and sines of each row.
          q_heads: the first rows, which are queries.
        """
        one, other = halves
        if weights is not None:
            row = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
            one, other = (
                _weighted(its, jnp.where(row < q_heads, *map(self.over_rows, both)))
                for its, both in zip(self._normed(*halves, eps, interpreted), weights, strict=True)
            )
        cosines, sines = angles
        return (
            _sum_of_products(one, cosines, -other, sines),
            _sum_of_products(other, cosines, one, sines),
        )

    def _normed(self, one, other, eps, interpreted):
        """Both halves of heads divided by their root mean square."""
        squares = _sum_of_products(one, one, other, other)
        total = row_sums(squares, self.layout, interpreted=interpreted)
        inverse = lax.broadcast_in_dim(lax.rsqrt(total / WIDTH + eps), self.shape, [0])
        return one * inverse, other * inverse

    def over_rows(self, vector):
        """What `over_columns` gives, in each row."""
        return lax.broadcast_in_dim(vector, self.shape, [1])


MANY = Heads(64, plgpu.Layout.WGMMA)
# A warp has 8 rows, one for four threads.
FEW = Heads(
    32,
    plgpu.Layout.TILED(
        plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    ),
)


def norm_operands(heads, q_weight, k_weight):
    """The layer's number and both weights, see `Heads`; None if nothing is normed."""
    if q_weight is None:
        return None
    weights = stacked_weights(heads, q_weight, k_weight)
    return layer_operands(*weights), *(its.stack for its in weights)


def _sum_of_products(a, b, c, d):
    """a * b + c * d, of any number of tokens with the same bits."""
    # Behind a barrier, or the compiler fuses one product with the addition here, the other there.
    return a * b + lax.optimization_barrier(c * d)


def _weighted(half, weight):
    """Rounded to the weight's dtype, times it, in float32."""
    return (half.astype(weight.dtype) * weight).astype(jnp.float32)
