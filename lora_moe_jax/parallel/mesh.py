"""Which mesh axes a model is split over, and the collectives its layers use inside `shard_map`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import Mesh

from lora_moe_jax.errors import ConfigError
from lora_moe_jax.parallel.nccl import check_nccl
from lora_moe_jax.parallel.ordered_sum import ordered_sum

SUPPORTED_AXES = ("tensor", "expert")


@dataclass(frozen=True)
class MeshAxes:
    """Names of the mesh axes that exist, None for those that do not.

    Layers run on one device's share of the weights; with no axes that is everything.
    """

    tensor: str | None = None
    expert: str | None = None

    def sum(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Sums `[rows, columns]` over the given axes that exist, with bits of each row alone."""
        present = tuple(axis for axis in axes if axis is not None)
        return ordered_sum(x, present) if present else x

    def the_one(self, x: jax.Array, axis: str | None) -> jax.Array:
        """Of shares of which all but one device's are zero, that one."""
        return x if axis is None else lax.psum(x, axis)

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
        raise _unknown_axis(unknown[0], mesh.shape)
    return MeshAxes(**{name: name for name in mesh.axis_names if name in SUPPORTED_AXES})


def mesh_of(mesh: Mesh | Mapping[str, int] | None) -> Mesh | None:
    """The mesh that everything here is written for: with automatic axes; None for None.

    `jax.make_mesh` makes explicit axes, under which each operation would have to name its
    output's sharding.

    Args:
      mesh: of devices; or how many of the first devices there are along each axis, by its name.

    Raises:
      ConfigError: it is neither, there are not so many devices, or GPUs would find NCCL too old.
    """
    if mesh is None:
        return None
    if isinstance(mesh, Mapping):
        mesh = _of_first_devices(mesh)
    if not isinstance(mesh, Mesh):
        raise _no_mesh(mesh)
    mesh = Mesh(mesh.devices, mesh.axis_names)
    check_nccl(mesh)
    return mesh


def _of_first_devices(sizes: Mapping[str, int]) -> Mesh:
    if not all(isinstance(axis, str) for axis in sizes):
        raise _no_mesh(sizes)
    if not sizes or not all(type(size) is int and size > 0 for size in sizes.values()):
        raise _no_mesh(sizes)
    if unknown := sorted(set(sizes) - set(SUPPORTED_AXES)):
        raise _unknown_axis(unknown[0], sizes)
    count, devices = math.prod(sizes.values()), jax.devices()
    if count > len(devices):
        raise ConfigError(
            "the mesh has more devices than there are",
            key="mesh",
            expected=f"at most {len(devices)} devices ({devices[0].device_kind})",
            found=str(dict(sizes)),
            hint="use a smaller mesh; JAX_NUM_CPU_DEVICES makes several devices of a CPU",
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices[:count])


def _unknown_axis(name: str, sizes: Mapping[str, int]) -> ConfigError:
    return ConfigError(
        "unknown mesh axis",
        key=f"mesh axis {name!r}",
        expected=f"axes named {SUPPORTED_AXES}",
        found=str(dict(sizes)),
        hint='name them, as in mesh={"expert": 2, "tensor": 2}',
    )


def _no_mesh(found: object) -> ConfigError:
    return ConfigError(
        "this is no mesh of devices",
        key="mesh",
        expected='a jax.sharding.Mesh, or sizes of its axes such as {"expert": 2, "tensor": 4}',
        found=f"{type(found).__name__}: {found!r}"[:200],
    )


def axis_size(mesh: Mesh | None, name: str) -> int:
    """Devices along an axis; 1 if it does not exist."""
    return 1 if mesh is None else dict(mesh.shape).get(name, 1)
