"""An adapter's values on the device, where a trainer has them: checked, and not copied out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lora_moe_jax.adapters.adapter import Adapter, LoraPair, short_names
from lora_moe_jax.adapters.bank import Bank, KvBLora, Place
from lora_moe_jax.adapters.check import check_factors
from lora_moe_jax.checkpoint.safetensors_file import FLOAT_DTYPES
from lora_moe_jax.errors import AdapterError
from pallas_kernels import Lora


class Factors(NamedTuple):
    """A `LoraPair` as compiled functions take it."""

    a: jax.Array
    b: jax.Array
    scaling: jax.Array


@dataclass(frozen=True)
class InSlot:
    """Stands for the host copy of an adapter whose values are in a slot alone.

    Attributes:
      ranks: of its projections, by name.
    """

    ranks: Mapping[str, int]
    layout = "device"
    nbytes = 0
    on_disk = False

    @property
    def rank(self) -> int:
        """The largest rank of any projection."""
        return max(self.ranks.values(), default=0)

    @property
    def targets(self) -> tuple[str, ...]:
        """As `Adapter.targets`."""
        return short_names(self.ranks)


@dataclass(frozen=True)
class DeviceParams:
    """Values that fit a bank, on its devices.

    Attributes:
      values: by `Projection.name`; `Factors` at the adapter's own rank, or a whole slot. Or, if
        there are places, stacks: `Factors` of several projections, with an axis for them in front.
      in_slot: what stands for them once they are written.
      places: of the projections, where values are stacks.
      finite: whether they are known to be.
    """

    values: Mapping[str, Factors | Lora | KvBLora]
    in_slot: InSlot
    places: tuple[tuple[str, Place], ...] = ()
    finite: bool = False

    @classmethod
    def of(cls, params: object, bank: Bank) -> DeviceParams:
        """Checks everything but that the values are finite, and waits for nothing.

        Args:
          params: an `Adapter`, or by `Projection.name` a `LoraPair`, or the arrays of one slot of
            the bank: `Lora` or `KvBLora` without the axis of slots, ranks padded with zeros.

        Raises:
          AdapterError: they do not fit the bank.
        """
        params = params.pairs if isinstance(params, Adapter) else params
        if not isinstance(params, Mapping):
            raise _wrong("params", "a mapping from projection names", type(params).__name__)
        values, ranks, there = {}, {}, bank.sharding
        for name, value in params.items():
            if not isinstance(name, str) or name not in bank.projections:
                expected = f"one of {len(bank.projections)} projections that have slots"
                raise _wrong(str(name)[:200], expected, "a name without slots")
            slot = bank.like(name)
            _check_arrays(name, value, slot)
            if isinstance(value, LoraPair):
                check_factors(name, value, bank.projections)
                bank.check_pair(name, value)
                value = Factors(value.a, value.b, value.scaling)
            else:
                _check_slot(name, value, slot, bank.classes)
            ranks[name] = value.a.shape[1]
            values[name] = type(value)(*(_beside(array, there) for array in value))
        return cls(values, InSlot(ranks))

    @classmethod
    def of_stacks(
        cls,
        factors: Mapping[str, tuple[jax.Array, jax.Array]],
        scalings: Mapping[str, jax.Array],
        places: Mapping[str, Place],
    ) -> DeviceParams:
        """What a trainer has made to fit the bank, in stacks.

        Args:
          factors, scalings: A, B and scaling `[projections, …]` of each stack.
        """
        values = {stack: Factors(*factors[stack], scalings[stack]) for stack in factors}
        ranks = {name: factors[stack][0].shape[2] for name, (stack, _) in places.items()}
        return cls(values, InSlot(ranks), tuple(places.items()))

    def moved(self, factors: Mapping[str, tuple[jax.Array, jax.Array]]) -> DeviceParams:
        """The same with finite A and B of the same shapes, which nobody checks again."""
        values = {}
        for name, own in self.values.items():
            a, b = factors[name]
            values[name] = own._replace(a=a, b=b)
        return replace(self, values=values, finite=True)


def _wrong(key: str, expected: object, found: object) -> AdapterError:
    return AdapterError(
        "the parameters do not fit the bank", key=key, expected=expected, found=found
    )


def _check_arrays(name: str, value: object, slot: Lora | KvBLora) -> None:
    kinds = (LoraPair, type(slot))
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise _wrong(name, expected, type(value).__name__)
    for array in (value.a, value.b, value.scaling) if isinstance(value, LoraPair) else value:
        if not isinstance(array, jax.Array | np.ndarray):
            raise _wrong(name, "arrays", type(array).__name__)
        if isinstance(array, jax.Array) and array.is_deleted():
            raise _wrong(name, "arrays that hold values", "one that was donated or deleted")
        if array.dtype not in FLOAT_DTYPES.values():
            raise _wrong(name, ", ".join(FLOAT_DTYPES), array.dtype)


def _check_slot(
    name: str, value: Lora | KvBLora, slot: Lora | KvBLora, ranks: Collection[int]
) -> None:
    """A slot is one of any rank class."""
    rank = value.a.shape[1] if value.a.ndim == 3 and value.a.shape[1] in ranks else max(ranks)
    for field, array, like in zip(slot._fields, value, slot, strict=True):
        groups, *sizes = like.shape
        shape = (groups, rank, *sizes[1:]) if sizes else (groups,)
        if array.shape != shape:
            raise _wrong(f"{name} {field}", list(shape), list(array.shape))


def _beside(x: jax.Array | np.ndarray, there: jax.sharding.Sharding) -> jax.Array | np.ndarray:
    """An array on these devices: as it is, or sent from device to device."""
    if not isinstance(x, jax.Array) or x.sharding.device_set == there.device_set:
        return x
    if isinstance(there, NamedSharding):
        there = NamedSharding(there.mesh, PartitionSpec())
    return jax.device_put(x, there)
