"""Which mesh axes a model is split over, and the collectives its layers use inside `shard_map`."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import Mesh

from lora_moe_jax.errors import ConfigError

SUPPORTED_AXES = ("tensor", "expert")


@dataclass(frozen=True)
class MeshAxes:
    """Names of the mesh axes that exist, None for those that do not.

    Layers run on one device's share of the weights; with no axes that is everything.
    """

    tensor: str | None = None
    expert: str | None = None

    def psum(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Sums over the given axes that exist."""
        present = tuple(axis for axis in axes if axis is not None)
        return lax.psum(x, present) if present else x

    def all_gather(self, x: jax.Array, axis: str | None, dimension: int) -> jax.Array:
        """Concatenates the shares of a split dimension."""
        return x if axis is None else lax.all_gather(x, axis, axis=dimension, tiled=True)

    def index(self, axis: str | None) -> jax.Array | int:
        """This device's place along an axis."""
        return 0 if axis is None else lax.axis_index(axis)


def mesh_axes(mesh: Mesh | None) -> MeshAxes:
    """The axes of `mesh` that layers may use.

    Raises:
      ConfigError: an axis with another name.
    """
    if mesh is None:
        return MeshAxes()
    # An axis of one device splits nothing, whatever its name.
    unknown = [n for n, size in mesh.shape.items() if n not in SUPPORTED_AXES and size > 1]
    if unknown:
        raise ConfigError(
            "unknown mesh axis",
            key=f"mesh axis {unknown[0]!r}",
            expected=f"axes named {SUPPORTED_AXES}, or of one device",
            found=str(dict(mesh.shape)),
            hint='make the mesh with jax.make_mesh((2, 2), ("expert", "tensor"))',
        )
    return MeshAxes(**{name: name for name in mesh.axis_names if name in SUPPORTED_AXES})


def automatic(mesh: Mesh | None) -> Mesh | None:
    """The same devices and names with automatic axes, which everything here is written for.

    `jax.make_mesh` makes explicit axes, under which each operation would have to name its
    output's sharding.
    """
    return None if mesh is None else Mesh(mesh.devices, mesh.axis_names)


def axis_size(mesh: Mesh | None, name: str) -> int:
    """Devices along an axis; 1 if it does not exist."""
    return 1 if mesh is None else dict(mesh.shape).get(name, 1)
