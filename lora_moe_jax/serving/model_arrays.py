"""A model taken apart into arrays: how parameters cross the boundary of compiled functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from lora_moe_jax.adapters.bank import Bank, KvBLora, SlotEntry, Stacks
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.adapter_slots import AdapterSlots, LoraParam
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.parallel.sharding import partition_spec, sharding_rules
from pallas_kernels import Lora


def reads_slices_in_place() -> bool:
    """Whether a kernel that gets a slice of an array reads it where it is: XLA's, for GPUs.

    There the bank's layers lie in one array each of their kind, as the host needs 1 to 3 µs for
    every array that it hands over; elsewhere a step would copy them.
    """
    return jax.default_backend() == "gpu"


class SlotField(NamedTuple):
    """Whose array this is: a rank class's, of a projection, and the name of its field."""

    rank: int
    projection: str
    name: str

    @classmethod
    def of(cls, slots: AdapterSlots, name: str) -> SlotField:
        """Of a field of a model's slots."""
        return cls(slots.rank, slots.projection.name, name)


class ModelArrays:
    """A model taken apart: its graph, its flat base weights, and its bank."""

    def __init__(self, model: Decoder, config: ModelConfig, mesh: Mesh | None):
        self.mesh = mesh
        self.rules = sharding_rules(config, mesh)
        self.graph, bank, base = nnx.split(model, LoraParam, ...)
        self.base, self._base_tree = jax.tree.flatten(base)
        _, self._bank_tree = jax.tree.flatten(bank)
        self._base_axes = [v.get_metadata("axes") for _, v in nnx.to_flat_state(base)]
        slots = {p: n for p, n in nnx.iter_graph(model) if isinstance(n, AdapterSlots)}
        # Of each of the bank's leaves: whose array it is, and its axes.
        self._bank_fields = [SlotField.of(slots[p[:-1]], p[-1]) for p, _ in nnx.to_flat_state(bank)]
        axes = [v.get_metadata("axes") for _, v in nnx.to_flat_state(bank)]
        self._bank_axes = dict(zip(self._bank_fields, axes, strict=True))
        classes: dict[int, dict[str, SlotEntry]] = {}
        for its in slots.values():
            entry = SlotEntry(its.projection, its.lora())
            classes.setdefault(its.rank, {})[its.projection.name] = entry
        self.bank = Bank(list(classes.values()), joined=reads_slices_in_place())

    def merge(self, base: list[jax.Array], stacks: Stacks) -> Decoder:
        """The model again, from (possibly traced, possibly split) arrays of base and bank."""
        parts = {
            (rank, name): its.lora(stacks[rank], name)
            for rank, its in self.bank.classes.items()
            for name in its.places
        }
        return self._merge(base, parts)

    def on_base(self) -> Decoder:
        """The model on its base arrays; of the slots only the shapes."""
        shapes = {
            (rank, name): jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), its.stacks[place.stack]
            )
            for rank, its in self.bank.classes.items()
            for name, place in its.places.items()
        }
        return self._merge(self.base, shapes)

    def _merge(self, base: list, parts: Mapping[tuple[int, str], Lora | KvBLora]) -> Decoder:
        bank = [getattr(parts[its.rank, its.projection], its.name) for its in self._bank_fields]
        base_state = jax.tree.unflatten(self._base_tree, base)
        return nnx.merge(self.graph, base_state, jax.tree.unflatten(self._bank_tree, bank))

    def specs(self) -> tuple[list[PartitionSpec], Stacks]:
        """How base arrays and the bank's stacks are split over the mesh."""
        base = [partition_spec(axes, self.rules) for axes in self._base_axes]
        bank: Stacks = {}
        for rank, stacks in self.bank.stacks.items():
            bank[rank] = {}
            for stack, lora in stacks.items():
                axes = (self._bank_axes[SlotField(rank, stack, name)] for name in lora._fields)
                specs = (partition_spec((None, *own), self.rules) for own in axes)
                bank[rank][stack] = type(lora)(*specs)
        return base, bank
