"""The bank: every slot's arrays on the device.

Only projections that some adapter may target have arrays. `SlotWriter` writes them, for the pool of
adapters alone: what a slot holds and what the prefix cache has of it must change together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lora_moe_jax.adapters.adapter import Adapter, LoraPair
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.errors import AdapterError
from pallas_kernels import Lora

ALIGNMENT = 256  # bytes, of what XLA hands to a kernel where it is


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


class Place(NamedTuple):
    """Where a projection is: in which stack of several, at which index of it."""

    stack: str
    index: int


class Bank:
    """Adapter slots of a model.

    Args:
      entries: for each projection name, its projection and arrays
        a `[slots, groups|1, rank, in]`, b `[slots, groups|1, rank, out]`, scaling
        `[slots, groups]`; or a `KvBLora`. All slots are empty: the arrays give their memory to
        the bank's.
      joined: whether projections that differ in their layer alone lie in one array.

    Attributes:
      projections: by name.
      stacks: the arrays, of a projection or of several: with an axis for them in front. Of
        several, scaling has room for so many slots that each projection's begins at an address
        from which a kernel reads it where it is: of anything else a step makes a copy first.
      places: of each projection in the stacks.
    """

    def __init__(self, entries: Mapping[str, SlotEntry], *, joined: bool = False):
        self.projections = {name: entry.projection for name, entry in entries.items()}
        self.stacks: dict[str, Lora | KvBLora] = {}
        self.places: dict[str, Place] = {}
        alike: dict[Hashable, list[str]] = {}
        for name, entry in entries.items():
            kind = _kind(name, entry.arrays) if joined else name
            alike.setdefault(kind, []).append(name)
        for first, *others in alike.values():
            names = [first, *others]
            self.places |= {name: Place(first, index) for index, name in enumerate(names)}
            lora = entries[first].arrays
            slots = [array.shape[0] for array in lora]
            if others:
                slots[-1] = _aligned_slots(lora.scaling)
            parts = zip(*(entries[name].arrays for name in names), strict=True)
            self.stacks[first] = type(lora)(*map(_room, parts, slots))

    @property
    def arrays(self) -> dict[str, Lora | KvBLora]:
        """Copies of all slots of every projection, as they are now."""
        copies = {name: self.lora(self.stacks, name) for name in self.places}
        return {name: type(its)(*(x[: self.slots] for x in its)) for name, its in copies.items()}

    def lora(self, stacks: Mapping[str, Lora | KvBLora], name: str) -> Lora | KvBLora:
        """A projection's part of stacks such as the bank's; scaling may have more slots."""
        stack, index = self.places[name]
        return type(stacks[stack])(*(array[index] for array in stacks[stack]))

    def like(self, name: str) -> Lora | KvBLora:
        """The shapes of one slot of a projection."""
        lora = self.stacks[self.places[name].stack]
        return type(lora)(*(jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for x in lora))

    @property
    def nbytes(self) -> int:
        """Bytes on all devices together."""
        return sum(array.nbytes for lora in self.stacks.values() for array in lora)

    @property
    def slots(self) -> int:
        """How many adapters fit."""
        return next((lora.a.shape[1] for lora in self.stacks.values()), 0)

    @property
    def max_rank(self) -> int:
        """The largest rank that fits."""
        return next((lora.a.shape[3] for lora in self.stacks.values()), 0)

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError unless the adapter fits into a slot."""
        for name, pair in adapter.pairs.items():
            self.check_pair(name, pair)

    def check_pair(self, name: str, pair: LoraPair) -> None:
        """`check` of one projection; only the shapes matter."""
        if name not in self.places:
            raise AdapterError(
                "the engine has no slots for a projection of this adapter",
                key=name,
                expected=f"one of {len(self.places)} projections that the engine was built for",
                found=name,
                hint="build the engine with target_modules that include it",
            )
        lora = self.like(name)
        if pair.a.shape[1] > lora.a.shape[1]:
            raise AdapterError(
                "the adapter's rank is above the bank's",
                key=name,
                expected=f"at most {lora.a.shape[1]}",
                found=str(pair.a.shape[1]),
                hint="build the engine with a larger max_rank",
            )
        # All factors of kv_b are shared by its heads, in files too.
        factors = () if isinstance(lora, KvBLora) else ((pair.a, lora.a), (pair.b, lora.b))
        for side, (values, slot) in zip(("lora_A", "lora_B"), factors, strict=False):
            if values.shape[0] > slot.shape[0]:
                raise AdapterError(
                    "the engine keeps one factor for all experts of a layer, the adapter has many",
                    key=f"{name} {side}",
                    expected="a factor shared by all experts",
                    found=f"{values.shape[0]} factors",
                    hint="build the engine with shared_outer=False",
                )


def _kind(name: str, lora: Lora | KvBLora) -> Hashable:
    """What projections have in common that may lie in one array."""
    arrays = tuple((x.shape, x.dtype, x.sharding) for x in lora)
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name), arrays


def _room(parts: Sequence[jax.Array], slots: int) -> jax.Array:
    """Zeros with an axis for the parts in front, each with so many slots; theirs are given back."""
    (_, *shape), dtype, sharding = parts[0].shape, parts[0].dtype, parts[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    for part in parts:
        part.delete()
    return jnp.zeros((len(parts), slots, *shape), dtype, device=sharding)


def _aligned_slots(scaling: jax.Array) -> int:
    """As many as scaling `[slots, groups]` has, or more: so that they fill whole units."""
    slots, groups = scaling.shape
    unit = ALIGNMENT // math.gcd(ALIGNMENT, groups * scaling.dtype.itemsize)
    return slots + -slots % unit
