"""The bank: every slot's arrays on the device.

Only projections that some adapter may target have arrays. `SlotWriter` writes them, for the pool of
adapters alone: what a slot holds and what the prefix cache has of it must change together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax

from lora_moe_jax.adapters.adapter import Adapter, LoraPair
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.errors import AdapterError
from pallas_kernels import Lora


class KvBLora(NamedTuple):
    """The slots of MLA's kv_b, which is used in two halves: B by head, key and value columns.

    Shapes: a `[slots, 1, rank, latent]`, b_key `[slots, heads, rank, nope]`, b_value
    `[slots, heads, rank, v]`, scaling `[slots, 1]`.
    """

    a: jax.Array
    b_key: jax.Array
    b_value: jax.Array
    scaling: jax.Array


@dataclass(frozen=True)
class SlotEntry:
    """One projection of the bank."""

    projection: Projection
    arrays: Lora | KvBLora


class Bank:
    """Adapter slots of a model.

    Args:
      entries: for each projection name, its projection and arrays
        a `[slots, groups|1, rank, in]`, b `[slots, groups|1, rank, out]`, scaling
        `[slots, groups]`; or a `KvBLora`.
    """

    def __init__(self, entries: Mapping[str, SlotEntry]):
        self.projections = {name: entry.projection for name, entry in entries.items()}
        self.arrays = {name: entry.arrays for name, entry in entries.items()}

    @property
    def nbytes(self) -> int:
        """Bytes on all devices together."""
        return sum(array.nbytes for lora in self.arrays.values() for array in lora)

    @property
    def slots(self) -> int:
        """How many adapters fit."""
        return next((lora.scaling.shape[0] for lora in self.arrays.values()), 0)

    @property
    def max_rank(self) -> int:
        """The largest rank that fits."""
        return next((lora.a.shape[2] for lora in self.arrays.values()), 0)

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError unless the adapter fits into a slot."""
        for name, pair in adapter.pairs.items():
            self.check_pair(name, pair)

    def check_pair(self, name: str, pair: LoraPair) -> None:
        """`check` of one projection; only the shapes matter."""
        if name not in self.arrays:
            raise AdapterError(
                "the engine has no slots for a projection of this adapter",
                key=name,
                expected=f"one of {len(self.arrays)} projections that the engine was built for",
                found=name,
                hint="build the engine with target_modules that include it",
            )
        lora = self.arrays[name]
        if pair.a.shape[1] > lora.a.shape[2]:
            raise AdapterError(
                "the adapter's rank is above the bank's",
                key=name,
                expected=f"at most {lora.a.shape[2]}",
                found=str(pair.a.shape[1]),
                hint="build the engine with a larger max_rank",
            )
        # All factors of kv_b are shared by its heads, in files too.
        factors = () if isinstance(lora, KvBLora) else ((pair.a, lora.a), (pair.b, lora.b))
        for side, (values, slots) in zip(("lora_A", "lora_B"), factors, strict=False):
            if values.shape[0] > slots.shape[1]:
                raise AdapterError(
                    "the engine keeps one factor for all experts of a layer, the adapter has many",
                    key=f"{name} {side}",
                    expected="a factor shared by all experts",
                    found=f"{values.shape[0]} factors",
                    hint="build the engine with shared_outer=False",
                )
