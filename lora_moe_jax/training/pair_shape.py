"""The sizes of a projection's factors in training, which its ranks and the bank decide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lora_moe_jax.adapters.bank import Bank
from lora_moe_jax.errors import AdapterError


@dataclass(frozen=True)
class PairShape:
    """Sizes of a pair of factors.

    Attributes:
      a, b: shapes `[groups or 1, rank, in]` and `[groups or 1, rank, out]`.
      ranks, scaling: int32 and float32 `[groups or 1]`, as in `LoraPair`.
    """

    a: tuple[int, int, int]
    b: tuple[int, int, int]
    ranks: np.ndarray
    scaling: np.ndarray

    @classmethod
    def of(cls, name: str, ranks: ArrayLike, scaling: ArrayLike, bank: Bank) -> PairShape:
        """A projection's, whose factors are shared by its experts if they are in the bank.

        Args:
          ranks, scaling: `[groups or 1]`; 0 for a group that is not trained.

        Raises:
          AdapterError: a rank is above the bank's, or differs between experts that share a factor.
        """
        projection, slot = bank.projections[name], bank.like(name)
        each = sorted(set(np.asarray(ranks).tolist()))
        rank = each[-1]
        if rank > bank.max_rank:
            raise AdapterError(
                "the adapter's rank is above the bank's",
                key=name,
                expected=f"at most {bank.max_rank}",
                found=rank,
                hint="build the engine with a larger max_rank",
            )
        b_groups = slot.b.shape[0] if hasattr(slot, "b") else 1  # kv_b's factors are whole
        a_groups = slot.a.shape[0]
        if min(a_groups, b_groups) < projection.groups and len(each) > 1:
            raise AdapterError(
                "experts that share a factor must have one rank",
                key=name,
                expected="the same rank for every expert",
                found=each,
                hint="give experts one rank, or build the engine with shared_outer=False",
            )
        count = max(a_groups, b_groups)
        return cls(
            (a_groups, rank, projection.in_features),
            (b_groups, rank, projection.out_features),
            np.array(np.broadcast_to(ranks, count), np.int32),
            np.array(np.broadcast_to(scaling, count), np.float32),
        )
