"""u made inside a product of rows that are a tile each: a shrink would be a kernel for little.

A's ranks are more features in every stage of the K loop, and u goes from their sums through shared
memory into the low-rank steps:

    stage: [ W: F x 64 | A: ranks x 64 | x: rows x 64 ]     A of the terms that have these features
                   '- 64 rows -'                            multiplied for u, with W's among them

Every program that has features of the row reads its A, and makes its u: from the L2, in the time
that W takes anyway. Sums and their rounding are those of `gpu_shrink`, so u has the same bits.
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

from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import packed_columns, rank_tile
from pallas_kernels.hopper.memory import from_first
from pallas_kernels.layered import is_layered, merged

RANKS = 64  # of all terms of a tile, at most: a block of features


class Unmade(NamedTuple):
    """u of a term that its product makes: the factor [S, G or 1, R, K], the scaling or None."""

    factor: jax.Array
    scaling: jax.Array | None


class Inner:
    """Whose the ranks are, and what of A a tile needs.

    Args:
      unmade: of each term. starts, widths: its columns of the product, in their order.
      gated: whether a tile has columns of every term, else of one.
    """

    def __init__(self, unmade: tuple[Unmade, ...], starts, widths, gated: bool):
        factors, scalings = zip(*unmade, strict=True)
        ranks = tuple(factor.shape[2] for factor in factors)
        first, owned = packed_columns(ranks, rank_tile(max(ranks)))
        self.first, self.owned = first if gated else (0,) * len(ranks), owned[0]
        self.used = (len(ranks) if gated else 1) * self.owned
        self.starts, self.widths, self.gated = starts, widths, gated
        self.groups = tuple(factor.shape[1] for factor in factors)
        self.scaling_groups = tuple(scaling.shape[1] for scaling in scalings)
        # Slots, and scalings, of a layer, where an array has those of many.
        self.slots_of_layer = tuple(merged(factor)[1] for factor in factors)
        self.scalings_of_layer = tuple(math.prod(s.shape) * is_layered(s) for s in scalings)

    @property
    def terms(self) -> range:
        return range(len(self.groups))

    @property
    def copies(self) -> int:
        """Of A, for each block of a stage."""
        return len(self.terms) if self.gated else 1

    def fits(self, features: int) -> bool:
        """Whether the terms of a tile of so many features have their ranks in one block."""
        # Narrow tiles are cut where terms begin and end, see `gpu_slices`.
        apart = features < RANKS or all(start % features == 0 for start in self.starts[1:])
        return self.used <= RANKS and (self.gated or apart)

    def of_tile(self, feature, action):
        """action(term) of every term that has columns of the tile; of the first if none begins."""
        if self.gated:
            for term in self.terms:
                action(term)
            return
        chosen = functools.partial(action, 0)
        for term in self.terms[1:]:
            its = functools.partial(action, term)
            chosen = functools.partial(lax.cond, self.has(term, feature), its, chosen)
        chosen()

    def has(self, term, feature):
        """Whether a tile's columns are the term's."""
        start = self.starts[term]
        return (feature >= start) & (feature < start + self.widths[term])

    def load(self, factors, layer, slot, tile, column, target, first_row, barrier):
        """Copies 64 columns of A to the rows of a block of a stage from the first on."""

        def copy(term):
            group = tile.group if self.groups[term] > 1 else 0
            # Past the term's ranks: zeros.
            plgpu.copy_gmem_to_smem(
                factors[term].at[
                    layer * self.slots_of_layer[term] + slot,
                    group,
                    from_first(self.owned, slot),
                    pl.ds(column, 64),
                ],
                target.at[pl.ds(first_row + self.first[term], self.owned)],
                barrier,
            )

        self.of_tile(tile.feature, copy)

    def scaling(self, scalings, layer, slot, tile):
        """What each term's ranks are scaled with; one number unless a tile has several terms."""
        found = []
        for term in self.terms:
            groups = self.scaling_groups[term]
            place = slot * groups + (tile.group if groups > 1 else 0)
            found.append(scalings[term][layer * self.scalings_of_layer[term] + place])
        if self.gated:
            return found
        chosen = found[0]
        for term in self.terms[1:]:
            chosen = jnp.where(self.has(term, tile.feature), found[term], chosen)
        return [chosen]

    def scaled(self, total, scalings, at: int):
        """The sums [64, rows], of ranks from row `at` on, times their scalings; zeros elsewhere."""
        row = plgpu.broadcasted_iota(jnp.int32, total.shape, 0, layout=plgpu.Layout.WGMMA)
        scaled = total * scalings[0]
        for first, scaling in zip(self.first[1:], scalings[1:], strict=False):
            scaled = jnp.where(row >= at + first, total * scaling, scaled)
        return jnp.where((row >= at) & (row < at + self.used), scaled, 0.0)
