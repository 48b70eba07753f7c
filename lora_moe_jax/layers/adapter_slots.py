"""The adapter slots of one projection: the arrays that adapters are written into."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.layers.build import Build
from pallas_kernels import Lora


class LoraParam(nnx.Variable):
    """An adapter array with the slot as its first axis."""


class AdapterSlots(nnx.Module):
    """A, B and scaling of every slot for one projection, zero until an adapter is written.

    Shapes: a `[slots, groups|1, rank, in]`, b `[slots, groups|1, rank, out]`, scaling float32
    `[slots, groups|1]`.
    """

    def __init__(
        self,
        projection: Projection,
        build: Build,
        *,
        in_axis: str | None = None,
        out_axis: str | None = None,
    ):
        config = build.adapters
        self.projection = projection
        groups = projection.groups
        name = projection.name.rsplit(".", 1)[-1]
        shared = config.shared_outer and projection.kind == "expert"
        a_groups = 1 if shared and name != "down_proj" else groups
        b_groups = 1 if shared and name == "down_proj" else groups
        self.a = self._zeros(config, a_groups, projection.in_features, in_axis)
        self.b = self._zeros(config, b_groups, projection.out_features, out_axis)
        expert = "expert" if groups > 1 else None
        self.scaling = LoraParam(
            jnp.zeros((config.slots, groups), jnp.float32), axes=(None, expert)
        )

    @staticmethod
    def _zeros(config, groups, width, axis):
        expert = "expert" if groups > 1 else None
        return LoraParam(
            jnp.zeros((config.slots, groups, config.rank, width), config.dtype),
            axes=(None, expert, None, axis),
        )

    def lora(self) -> Lora:
        """The arrays in the form that the kernels take."""
        return Lora(self.a[...], self.b[...], self.scaling[...])


def adapter_slots(projection: Projection, build: Build, **axes) -> AdapterSlots | None:
    """The slots of a projection, or None when no adapter may target it."""
    config = build.adapters
    if config is None or not (config.targets is None or projection.name in config.targets):
        return None
    return AdapterSlots(projection, build, **axes)


def lora_of(slots: AdapterSlots | None) -> Lora | None:
    """`slots.lora()`, None if there are none."""
    return None if slots is None else slots.lora()
