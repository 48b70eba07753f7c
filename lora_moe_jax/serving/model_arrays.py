"""A model as flat lists of arrays: how parameters cross the boundary of compiled functions."""

from __future__ import annotations

import operator

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from lora_moe_jax.adapters.bank import Bank, SlotEntry
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.adapter_slots import AdapterSlots, LoraParam
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.parallel.sharding import partition_spec, sharding_rules


class ModelArrays:
    """A model taken apart: its graph, its flat base weights, and its bank."""

    def __init__(self, model: Decoder, config: ModelConfig, mesh: Mesh | None):
        self.mesh = mesh
        self.rules = sharding_rules(config, mesh)
        self.graph, bank, base = nnx.split(model, LoraParam, ...)
        self.base, self._base_tree = jax.tree.flatten(base)
        _, self._bank_tree = jax.tree.flatten(bank)
        self._bank_paths = [path for path, _ in nnx.to_flat_state(bank)]
        self._base_axes = [v.get_metadata("axes") for _, v in nnx.to_flat_state(base)]
        self._bank_axes = [v.get_metadata("axes") for _, v in nnx.to_flat_state(bank)]
        slots = {p: n for p, n in nnx.iter_graph(model) if isinstance(n, AdapterSlots)}
        self.bank = Bank(
            {s.projection.name: SlotEntry(s.projection, s.lora()) for s in slots.values()}
        )
        self._names = {path: s.projection.name for path, s in slots.items()}
        self._seen: list = []  # of the bank, when the leaves were listed
        self._leaves: list[jax.Array] = []

    def bank_leaves(self) -> list[jax.Array]:
        """The bank's arrays in the order that `merge` takes them, listed anew when one is new."""
        arrays = self.bank.arrays
        now = list(arrays.values())
        if len(now) != len(self._seen) or not all(map(operator.is_, now, self._seen)):
            names = self._names
            self._leaves = [getattr(arrays[names[p[:-1]]], p[-1]) for p in self._bank_paths]
            self._seen = now
        return self._leaves

    def merge(self, base: list[jax.Array], bank: list[jax.Array]) -> Decoder:
        """The model again, from (possibly traced, possibly split) arrays."""
        base_state = jax.tree.unflatten(self._base_tree, base)
        return nnx.merge(self.graph, base_state, jax.tree.unflatten(self._bank_tree, bank))

    def specs(self) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """How base and bank arrays are split over the mesh."""
        return tuple(
            [partition_spec(axes, self.rules) for axes in group]
            for group in (self._base_axes, self._bank_axes)
        )
