"""Sums over devices: their bits, by either way, wherever a row lies."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lora_moe_jax.parallel import ordered_sum
from lora_moe_jax.parallel.mesh import mesh_of

MESHES = {
    "two": {"tensor": 2},
    "four": {"expert": 4},
    "both-axes": {"expert": 2, "tensor": 2},
}


def sums(axes: dict[str, int], shares: np.ndarray) -> np.ndarray:
    """What each device gets, [devices, rows, columns]."""
    of_device = PartitionSpec(tuple(axes))
    mapped = jax.shard_map(
        lambda share: ordered_sum.ordered_sum(share[0], tuple(axes))[None],
        mesh=mesh_of(axes),
        in_specs=of_device,
        out_specs=of_device,
        check_vma=False,
    )
    return np.asarray(jax.jit(mapped)(shares))


def shares_of(devices: int, rows: int, columns: int) -> np.ndarray:
    """Of so different sizes that every order of adding them gives other bits."""
    rng = np.random.default_rng(7)
    shape = devices, rows, columns
    return (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(
    ("few_bytes", "columns"),
    [(3 << 20, 64), (0, 64), (0, 65)],
    ids=["at-once", "in-parts", "columns-that-do-not-divide"],
)
def test_shares_are_added_in_order_of_the_devices(axes, few_bytes, columns, monkeypatch):
    monkeypatch.setattr(ordered_sum, "FEW_BYTES", few_bytes)
    devices = int(np.prod(list(axes.values())))
    shares = shares_of(devices, 5, columns)
    expected = functools.reduce(np.add, shares)
    for found in sums(axes, shares):
        np.testing.assert_array_equal(found, expected)
    if devices > 2:
        assert (functools.reduce(np.add, shares[::-1]) != expected).any()
