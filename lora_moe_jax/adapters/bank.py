"""The bank: every slot's arrays on the device.

Only projections that some adapter may target have arrays, and slots may be of several ranks, so
that one adapter of a large rank does not make every slot large. `SlotWriter` writes them, for the
pool of adapters alone: what a slot holds and what the prefix cache has of it must change together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lora_moe_jax.adapters.adapter import Adapter, LoraPair
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.errors import AdapterError
from pallas_kernels import Lora
from pallas_kernels.layered import Layered, without_layers


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


Stacks = dict[int, dict[str, Lora | KvBLora]]  # of each class, by its rank


class Place(NamedTuple):
    """Where a projection is: in which stack of several, at which index of it."""

    stack: str
    index: int


class RankClass:
    """The slots of one rank.

    Args:
      entries: for each projection name, its projection and arrays
        a `[slots, groups|1, rank, in]`, b `[slots, groups|1, rank, out]`, scaling
        `[slots, groups]`; or a `KvBLora`. All slots are empty: the arrays give their memory to
        the bank's.
      kinds: of projections: those of one kind lie in one array, in their order.

    Attributes:
      slots: how many adapters fit.
      rank: the largest that fits.
      stacks: the arrays, of a projection or of several: with an axis for them in front.
      places: of each projection in the stacks.
    """

    def __init__(self, entries: Mapping[str, SlotEntry], kinds: Mapping[str, Hashable]):
        self.stacks: dict[str, Lora | KvBLora] = {}
        self.places: dict[str, Place] = {}
        alike: dict[Hashable, list[str]] = {}
        for name in entries:
            alike.setdefault(kinds.get(name, name), []).append(name)
        for first, *others in alike.values():
            names = [first, *others]
            self.places |= {name: Place(first, index) for index, name in enumerate(names)}
            parts = zip(*(entries[name].arrays for name in names), strict=True)
            self.stacks[first] = type(entries[first].arrays)(*map(_room, parts))
        _, self.slots, _, self.rank, _ = next(iter(self.stacks.values())).a.shape

    def lora(self, stacks: Mapping[str, Lora | KvBLora], name: str) -> Lora | KvBLora:
        """A projection's part of stacks such as these; `Layered` of a stack of several."""
        stack, index = self.places[name]
        lora = stacks[stack]
        if lora.a.shape[0] == 1:
            return type(lora)(*(array[0] for array in lora))
        return type(lora)(*(Layered(array, index) for array in lora))

    def like(self, name: str) -> Lora | KvBLora:
        """The shapes of one slot of a projection."""
        lora = self.stacks[self.places[name].stack]
        return type(lora)(*(jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for x in lora))

    def copy(self, name: str) -> Lora | KvBLora:
        """All slots of a projection, as they are now."""
        return without_layers(self.lora(self.stacks, name))


class Bank:
    """Adapter slots of a model, in one rank class or several.

    Slots are numbered through the classes, which come in order of their ranks.

    Args:
      entries: of each class, see `RankClass`; none for a model without slots.
      kinds: of projections: those of one kind lie in one array, in their order; others alone.

    Attributes:
      projections: by name.
      classes: by their rank, in order.
    """

    def __init__(
        self,
        entries: Sequence[Mapping[str, SlotEntry]],
        kinds: Mapping[str, Hashable] = MappingProxyType({}),
    ):
        self.projections = {
            name: entry.projection for its in entries[:1] for name, entry in its.items()
        }
        classes = [RankClass(its, kinds) for its in entries]
        self.classes = {its.rank: its for its in sorted(classes, key=lambda its: its.rank)}

    @property
    def stacks(self) -> Stacks:
        """The arrays of every class."""
        return {rank: its.stacks for rank, its in self.classes.items()}

    @stacks.setter
    def stacks(self, stacks: Stacks) -> None:
        for rank, its in self.classes.items():
            its.stacks = stacks[rank]

    @property
    def arrays(self) -> dict[str, Lora | KvBLora | tuple[Lora | KvBLora, ...]]:
        """Copies of all slots of every projection, as they are now; by class, if there are some."""
        copies = {
            name: tuple(its.copy(name) for its in self.classes.values())
            for name in self.projections
        }
        return {name: its if len(its) > 1 else its[0] for name, its in copies.items()}

    @property
    def nbytes(self) -> int:
        """Bytes on all devices together."""
        return sum(array.nbytes for array in jax.tree.leaves(self.stacks))

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Of one of the arrays: where the bank is."""
        return jax.tree.leaves(self.stacks)[0].sharding

    @property
    def ranks(self) -> tuple[int, ...]:
        """The largest rank that fits into each slot."""
        return tuple(its.rank for its in self.classes.values() for _ in range(its.slots))

    @property
    def slots(self) -> int:
        """How many adapters fit."""
        return sum(its.slots for its in self.classes.values())

    @property
    def max_rank(self) -> int:
        """The largest rank that fits into any slot."""
        return max(self.classes, default=0)

    def locate(self, slot: int) -> tuple[int, int]:
        """The rank of a slot's class, and its number there."""
        for rank, its in self.classes.items():
            if slot < its.slots:
                return rank, slot
            slot -= its.slots
        raise IndexError(f"the bank has {self.slots} slots")

    def like(self, name: str) -> Lora | KvBLora:
        """The shapes of one of a projection's largest slots."""
        return self.classes[self.max_rank].like(name)

    def fitted(self, adapter: Adapter) -> Adapter:
        """The adapter as a slot has room for it: where the bank keeps one factor for all experts,
        those of a file for each are one, if they are the same.

        Raises:
          AdapterError: it does not fit, see `check`.
        """
        shared = {
            name: fitted
            for name, pair in adapter.pairs.items()
            if name in self.projections and (fitted := _with_shared(pair, self.like(name)))
        }
        if shared:
            adapter = replace(adapter, pairs={**adapter.pairs, **shared})
        self.check(adapter)
        return adapter

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError unless the adapter fits into a slot."""
        for name, pair in adapter.pairs.items():
            self.check_pair(name, pair)

    def check_pair(self, name: str, pair: LoraPair) -> None:
        """`check` of one projection; only the shapes matter."""
        if name not in self.projections:
            raise AdapterError(
                "the engine has no slots for a projection of this adapter",
                key=name,
                expected=f"one of {len(self.projections)} that the engine was built for",
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


def _with_shared(pair: LoraPair, slot: Lora | KvBLora) -> LoraPair | None:
    """The pair with one factor where the slot has one and all of the pair's are the same."""
    if isinstance(slot, KvBLora):
        return None
    groups = pair.scaling.shape[0]
    for side, other in (("a", "b"), ("b", "a")):
        values = getattr(pair, side)
        lacks_room = getattr(slot, side).shape[0] == 1 < values.shape[0] == groups
        if lacks_room and getattr(pair, other).shape[0] == groups and (values == values[:1]).all():
            return replace(pair, **{side: values[:1]})
    return None


def _room(parts: Sequence[jax.Array]) -> jax.Array:
    """Zeros with an axis for the parts in front, whose memory is given back."""
    shape, dtype, sharding = parts[0].shape, parts[0].dtype, parts[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    for part in parts:
        part.delete()
    return jnp.zeros((len(parts), *shape), dtype, device=sharding)
