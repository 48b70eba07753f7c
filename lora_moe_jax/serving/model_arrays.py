"""A model taken apart into arrays: how parameters cross the boundary of compiled functions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from lora_moe_jax.adapters.bank import Bank, KvBLora, SlotEntry, Stacks
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.adapter_slots import AdapterSlots, LoraParam
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.models.layer_loop import loops
from lora_moe_jax.models.layer_stacks import Path
from lora_moe_jax.parallel.sharding import partition_spec, sharding_rules
from pallas_kernels import Lora
from pallas_kernels.layered import Layered, is_layered


class SlotField(NamedTuple):
    """Whose array this is: a rank class's, of a projection, and the name of its field."""

    rank: int
    projection: str
    name: str

    @classmethod
    def of(cls, slots: AdapterSlots, name: str) -> SlotField:
        """Of a field of a model's slots."""
        return cls(slots.rank, slots.projection.name, name)


class BasePlace(NamedTuple):
    """Where a parameter is: in which of the base arrays, and of a stack in which layer of it."""

    number: int
    layer: int | None


class ModelArrays:
    """A model taken apart: its graph, its base arrays, and its bank.

    Where layers' base weights are parts of the same stacks, so are their adapters' slots, by the
    same numbers.
    """

    def __init__(self, model: Decoder, config: ModelConfig, mesh: Mesh | None):
        self.mesh = mesh
        self.rules = sharding_rules(config, mesh)
        self.graph, bank, base = nnx.split(model, LoraParam, ...)
        self.base: list[jax.Array] = []
        self._base_axes: list[tuple[str | None, ...]] = []
        leaves, self._base_tree = jax.tree.flatten(base, is_leaf=is_layered)
        axes = (v.get_metadata("axes") for _, v in nnx.to_flat_state(base))
        self._base_places = self._places(leaves, axes)
        _, self._bank_tree = jax.tree.flatten(bank)
        slots = {p: n for p, n in nnx.iter_graph(model) if isinstance(n, AdapterSlots)}
        # Of each of the bank's leaves: whose array it is, and its axes.
        self._bank_fields = [SlotField.of(slots[p[:-1]], p[-1]) for p, _ in nnx.to_flat_state(bank)]
        axes = [v.get_metadata("axes") for _, v in nnx.to_flat_state(bank)]
        self._bank_axes = dict(zip(self._bank_fields, axes, strict=True))
        classes: dict[int, dict[str, SlotEntry]] = {}
        for its in slots.values():
            entry = SlotEntry(its.projection, its.lora())
            classes.setdefault(its.rank, {})[its.projection.name] = entry
        self.bank = Bank(list(classes.values()), _kinds(model, slots))

    def _places(self, leaves, axes) -> list[BasePlace]:
        """Puts the leaves' arrays into `base`, each once, and says where each leaf is."""
        places, numbers = [], {}
        for leaf, its in zip(leaves, axes, strict=True):
            layer, array = (leaf.number, leaf.stack) if is_layered(leaf) else (None, leaf)
            if id(array) not in numbers:
                numbers[id(array)] = len(self.base)
                self.base.append(array)
                self._base_axes.append(its if layer is None else (None, *its))
            places.append(BasePlace(numbers[id(array)], layer))
        return places

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
        leaves = [
            base[number] if layer is None else Layered(base[number], layer)
            for number, layer in self._base_places
        ]
        base_state = jax.tree.unflatten(self._base_tree, leaves)
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


def _kinds(model: Decoder, slots: Mapping[Path, AdapterSlots]) -> dict[str, Hashable]:
    """Of the projections of layers that the decoder makes a loop of: what is in one array."""
    run_of = {
        number: run for run in loops(model.layers, nnx.Param) for number in run if len(run) > 1
    }
    return {
        its.projection.name: (run_of[path[1]].start, path[2:])
        for path, its in slots.items()
        if path[0] == "layers" and path[1] in run_of
    }
