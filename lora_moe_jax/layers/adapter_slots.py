"""The adapter slots of one projection: the arrays that adapters are written into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import nnx

from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.layers.build import Build
from pallas_kernels import Lora, Slots


class LoraParam(nnx.Variable):
    """An adapter array with the slot as its first axis."""


class AdapterSlots(nnx.Module):
    """A, B and scaling of every slot for one projection, zero until an adapter is written.

    Shapes: a `[slots, groups|1, rank, in]`, b `[slots, groups|1, rank, out]`, scaling float32
    `[slots, groups]`.
    """

    def __init__(
        self,
        projection: Projection,
        build: Build,
        *,
        in_axis: str | None = None,
        out_axis: str | None = None,
    ):
        config, groups = build.adapters, projection.groups
        self.projection = projection
        name = projection.name.rsplit(".", 1)[-1]
        shared = config.shared_outer and projection.kind == "expert"
        a_groups = 1 if shared and name != "down_proj" else groups
        b_groups = 1 if shared and name == "down_proj" else groups
        a_shape = (a_groups, config.rank, projection.in_features)
        b_shape = (b_groups, config.rank, projection.out_features)
        self.a = zero_slots(build, a_shape, (_expert_axis(a_groups), None, in_axis))
        self.b = zero_slots(build, b_shape, (_expert_axis(b_groups), None, out_axis))
        self.scaling = zero_slots(build, (groups,), (_expert_axis(groups),), "float32")

    @property
    def rank(self) -> int:
        """The largest that fits."""
        return self.a.shape[2]

    def lora(self) -> Lora:
        """The arrays in the form that the kernels take."""
        return Lora(self.a[...], self.b[...], self.scaling[...])


class RankClasses(nnx.Module):
    """The slots of one projection in several rank classes, the smallest rank first."""

    def __init__(self, classes: Sequence[AdapterSlots]):
        self.classes = nnx.List(classes)


def zero_slots(
    build: Build, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: str | None = None
) -> LoraParam:
    """An array of this shape for every slot; `axes` are the logical names of its dimensions."""
    config = build.adapters
    return LoraParam(jnp.zeros((config.slots, *shape), dtype or config.dtype), axes=(None, *axes))


def _expert_axis(groups: int) -> str | None:
    return "expert" if groups > 1 else None


def adapter_slots(
    projection: Projection, build: Build, kind: type[AdapterSlots] = AdapterSlots, **of_kind
) -> AdapterSlots | RankClasses | None:
    """The slots of a projection, or None when no adapter may target it.

    Args:
      of_kind: what the kind of slots is built with.
    """
    config = build.adapters
    if config is None or (config.targets is not None and projection.name not in config.targets):
        return None
    classes = [kind(projection, its, **of_kind) for its in build.classes()]
    return classes[0] if len(classes) == 1 else RankClasses(classes)


def lora_of(
    slots: AdapterSlots | RankClasses | None,
    form: Callable[[AdapterSlots], Lora] = AdapterSlots.lora,
) -> Slots | None:
    """The arrays in the form that the kernels take, None if there are none."""
    if isinstance(slots, RankClasses):
        return tuple(map(form, slots.classes))
    return None if slots is None else form(slots)
