"""The bank: every slot's arrays on the device, and the compiled update that writes one slot.

Only projections that some adapter may target have arrays. Writing a slot donates the old arrays,
so nothing is reallocated, and runs one compiled function for each shape, so nothing is recompiled.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lora_moe_jax.adapters.adapter import Adapter, LoraPair
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.errors import AdapterError
from pallas_kernels import Lora


@dataclass(frozen=True)
class SlotEntry:
    """One projection of the bank."""

    projection: Projection
    arrays: Lora


class Bank:
    """Adapter slots of a model.

    Args:
      entries: for each projection name, its projection and arrays
        a `[slots, groups|1, rank, in]`, b `[slots, groups|1, rank, out]`,
        scaling `[slots, groups]`.
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

    def warm_up(self) -> None:
        """Compiles the slot writer for every shape by clearing slot 0."""
        self._write_all(0, {})

    def write(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot; projections it does not have become zero.

        Raises:
          AdapterError: it does not fit. Nothing is written then.
        """
        for name, pair in adapter.pairs.items():
            self._check(name, pair)
        self._write_all(slot, adapter.pairs)

    def _write_all(self, slot: int, pairs: Mapping[str, LoraPair]) -> None:
        index = np.int32(slot)
        for name, lora in self.arrays.items():
            values = self._padded(lora, pairs.get(name))
            shardings = Lora(*(array.sharding for array in lora))
            self.arrays[name] = _write_slot(lora, index, values, shardings)

    def _check(self, name: str, pair: LoraPair) -> None:
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
        for side, values, slots in (("lora_A", pair.a, lora.a), ("lora_B", pair.b, lora.b)):
            if values.shape[0] > slots.shape[1]:
                raise AdapterError(
                    "the engine keeps one factor for all experts of a layer, the adapter has many",
                    key=f"{name} {side}",
                    expected="a factor shared by all experts",
                    found=f"{values.shape[0]} factors",
                    hint="build the engine with shared_outer=False",
                )

    @staticmethod
    def _padded(lora: Lora, pair: LoraPair | None) -> Lora:
        """The slot's new values: ranks padded with zeros, shared factors repeated if need be."""
        shapes = Lora(*(array.shape[1:] for array in lora))
        values = Lora(
            *(np.zeros(shape, array.dtype) for shape, array in zip(shapes, lora, strict=True))
        )
        if pair is not None:
            rank = pair.a.shape[1]
            values.a[:, :rank] = pair.a
            values.b[:, :rank] = pair.b
            values.scaling[:] = pair.scaling
        return values


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write_slot(lora: Lora, slot: jax.Array, values: Lora, shardings: Lora) -> Lora:
    def write(array, value, sharding):
        updated = jax.lax.dynamic_update_index_in_dim(array, jnp.asarray(value), slot, 0)
        return jax.lax.with_sharding_constraint(updated, sharding)

    return Lora(*map(write, lora, values, shardings))
