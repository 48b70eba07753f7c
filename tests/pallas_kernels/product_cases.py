"""What calls of a product have in common, on every backend."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_lora_matmul.gate import Gate


@dataclasses.dataclass(frozen=True)
class Term:
    """One low-rank term; shared: one factor for all groups."""

    start: int
    width: int
    rank: int = 4
    shared: bool = False

    def factor_shape(self, slots, groups):
        return slots, 1 if self.shared else groups, self.rank, self.width


@dataclasses.dataclass(frozen=True)
class ProductSizes:
    """Static sizes of a product, all of one compilation."""

    rows: int
    k: int
    n: int
    terms: tuple[Term, ...] = ()
    contract: int = 2
    gate: Gate | None = None
    groups: int = 3
    slots: int = 4
    biased: bool = False

    @property
    def static(self):
        starts = tuple(term.start for term in self.terms)
        return dict(starts=starts, contract=self.contract, gate=self.gate)

    def bias(self, dtype):
        """[G, N] of the size of what it is added to; None without one."""
        if not self.biased:
            return None
        rng = np.random.default_rng(self.n)
        return rng.standard_normal((self.groups, self.n)).astype(jnp.dtype(dtype))

    @property
    def w_shape(self):
        return self.groups, *((self.n, self.k) if self.contract == 2 else (self.k, self.n))


def layer_products(shape):
    """(name, K, N, starts, widths, contract, gate) of the products of a MoE layer and its gradient.

    `starts` and `widths` are the output columns of each low-rank term. See `has_bias`.
    """
    hidden, wide = shape.hidden, shape.intermediate
    both = (0, wide), (wide, wide)
    yield "gate_up gated", hidden, 2 * wide, *both, 2, shape.gate
    yield "gate_up", hidden, 2 * wide, *both, 2, None
    yield "down", wide, hidden, (0,), (hidden,), 2, None
    yield "gate_up backward", 2 * wide, hidden, (0, 0), (hidden, hidden), 1, None
    yield "down backward", hidden, wide, (0,), (wide,), 1, None
    yield "gate_up without adapters", hidden, 2 * wide, (), (), 2, shape.gate


def has_bias(shape, name: str) -> bool:
    """Whether a product of `layer_products` has one: gate and up of some, forward."""
    return shape.biased and name.startswith("gate_up") and "backward" not in name
