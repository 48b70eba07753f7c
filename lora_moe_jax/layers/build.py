"""What every layer needs to be built: dtype, adapter slots, mesh axes, random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import nnx

from lora_moe_jax.layers.checkpoint_layout import AS_STORED, CheckpointLayout
from lora_moe_jax.parallel.mesh import MeshAxes


@dataclass(frozen=True)
class SlotConfig:
    """The adapter slots that a model's layers are built with.

    Attributes:
      slots: how many adapters fit.
      rank: the largest rank that fits; or (rank, slots) for each that some of the slots hold.
      dtype: dtype of A and B.
      targets: projection names that get slots; None for all of them.
      shared_outer: keep one A for gate/up and one B for down for all experts of a layer.
    """

    slots: int
    rank: int | tuple[tuple[int, int], ...]
    dtype: str = "bfloat16"
    targets: frozenset[str] | None = None
    shared_outer: bool = False

    def classes(self) -> list[SlotConfig]:
        """The slots of each rank, the smallest first."""
        if isinstance(self.rank, int):
            return [self]
        return [replace(self, slots=slots, rank=rank) for rank, slots in sorted(self.rank)]


@dataclass(frozen=True)
class Build:
    """Passed down while a model is built; nothing here changes afterwards."""

    rngs: nnx.Rngs = field(hash=False, compare=False)
    dtype: str = "bfloat16"
    adapters: SlotConfig | None = None
    axes: MeshAxes = MeshAxes()
    rules: tuple[tuple[str, str | None], ...] = ()
    tensor_devices: int = 1

    def mesh_axis(self, logical: str | None) -> str | None:
        """The mesh axis a logical axis is split over, if any."""
        return dict(self.rules).get(logical) if logical else None

    def classes(self) -> list[Build]:
        """To build the adapter slots of each rank with."""
        return [replace(self, adapters=its) for its in self.adapters.classes()]

    def weight(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        tensors: tuple[str, ...],
        layout: CheckpointLayout = AS_STORED,
        dtype: str | None = None,
    ) -> nnx.Param:
        """A base weight, random until a checkpoint is loaded.

        Args:
          axes: logical name of each dimension.
          tensors: names of the checkpoint tensors it comes from.
          layout: how it is made from them.
        """
        scale = shape[-1] ** -0.5
        value = scale * jax.random.normal(self.rngs.params(), shape, jnp.float32)
        return self._param(value, axes, tensors, layout, dtype)

    def scale(self, size: int, tensor: str) -> nnx.Param:
        """A norm's weight."""
        return self._param(jnp.ones(size, jnp.float32), (None,), (tensor,), AS_STORED, None)

    def bias(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *tensors: str,
        layout: CheckpointLayout = AS_STORED,
        dtype: str | None = None,
    ) -> nnx.Param:
        """What is zero until a checkpoint is loaded."""
        return self._param(jnp.zeros(shape, jnp.float32), axes, tensors, layout, dtype)

    def _param(self, value, axes, tensors, layout, dtype):
        return nnx.Param(
            value.astype(dtype or self.dtype), axes=axes, tensors=tensors, layout=layout
        )
