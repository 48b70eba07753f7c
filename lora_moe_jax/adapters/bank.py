"""The bank: every slot's arrays on the device, and the compiled update that writes one slot.

Only projections that some adapter may target have arrays. Writing a slot donates the old arrays,
so nothing is reallocated, and runs one compiled function for each shape, so nothing is recompiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

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
        self._writers = self._compile_writers()

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
            self._check(name, pair)

    def write(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot; projections it does not have become zero.

        Raises:
          AdapterError: it does not fit. Nothing is written then.
        """
        self.check(adapter)
        index = np.int32(slot)
        for name, lora in self.arrays.items():
            values = self._padded(lora, adapter.pairs.get(name))
            self.arrays[name] = self._writers[name](lora, index, values)

    def _compile_writers(self) -> dict[str, Any]:
        """The compiled writer of each projection; projections of one shape share theirs."""
        compiled: dict[tuple, Any] = {}
        writers = {}
        for name, lora in self.arrays.items():
            key = tuple((array.shape, array.dtype, array.sharding) for array in lora)
            if key not in compiled:
                shardings = type(lora)(*(array.sharding for array in lora))
                write = jax.jit(_write_slot, donate_argnums=0, out_shardings=shardings)
                compiled[key] = write.lower(lora, np.int32(0), self._padded(lora, None)).compile()
            writers[name] = compiled[key]
        return writers

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

    @staticmethod
    def _padded(lora: Lora | KvBLora, pair: LoraPair | None) -> Lora | KvBLora:
        """The slot's new values: ranks padded with zeros, shared factors repeated if need be."""
        values = type(lora)(*(np.zeros(array.shape[1:], array.dtype) for array in lora))
        if pair is None:
            return values
        rank = pair.a.shape[1]
        values.a[:, :rank] = pair.a
        values.scaling[:] = pair.scaling
        if isinstance(lora, KvBLora):
            heads, _, nope = values.b_key.shape
            by_head = pair.b[0].reshape(rank, heads, -1).swapaxes(0, 1)
            values.b_key[:, :rank] = by_head[:, :, :nope]
            values.b_value[:, :rank] = by_head[:, :, nope:]
        else:
            values.b[:, :rank] = pair.b
        return values


def _write_slot(lora, slot: jax.Array, values):
    """The arrays of one projection with one slot replaced."""
    return type(lora)(
        *(
            jax.lax.dynamic_update_index_in_dim(array, value, slot, 0)
            for array, value in zip(lora, values, strict=True)
        )
    )
