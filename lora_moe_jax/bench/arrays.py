"""Random inputs of the benchmarks. Never zeros: those are faster than anything real."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lora_moe_jax.bench.roofline import Active
from pallas_kernels import Lora
from pallas_kernels.shapes import ProductShape

DTYPE = jnp.bfloat16


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, shape, scale, dtype):
    def block(key, shape):
        return (scale * jax.random.normal(key, shape)).astype(dtype)

    if len(shape) < 3:
        return block(key, shape)
    # One matrix at a time, as weights may hold more than 2^32 values.
    return lax.map(lambda key: block(key, shape[1:]), jax.random.split(key, shape[0]))


def normal(seed: int, *shape: int, scale: float = 1.0, dtype=DTYPE) -> jax.Array:
    return _normal(jax.random.key(seed), shape, scale, dtype)


def weights(seed: int, shape: ProductShape, dtype=DTYPE) -> jax.Array:
    """`[groups, n, k]` of unit gain."""
    return normal(seed, shape.groups, shape.n, shape.k, scale=shape.k**-0.5, dtype=dtype)


def adapters(
    seed: int,
    shape: ProductShape,
    slots: int,
    rank: int,
    *,
    shared_a: bool = False,
    shared_b: bool = False,
    dtype=DTYPE,
) -> tuple[Lora, ...]:
    """One bank for each part, whose product is about as large as the base's."""
    a_groups, b_groups = (1 if shared else shape.groups for shared in (shared_a, shared_b))
    return tuple(
        Lora(
            normal(seed + 2 * i, slots, a_groups, rank, shape.k, scale=shape.k**-0.5, dtype=dtype),
            normal(seed + 2 * i + 1, slots, b_groups, rank, width, scale=rank**-0.5, dtype=dtype),
            jnp.ones((slots, 1)),
        )
        for i, width in enumerate(shape.parts)
    )


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows sorted by (group, slot): int32 group_sizes [groups], row_slots [rows] (-1: none)."""

    group_sizes: np.ndarray
    row_slots: np.ndarray

    @property
    def active(self) -> Active:
        group = np.repeat(np.arange(len(self.group_sizes)), self.group_sizes)
        return active_of(group, self.row_slots, len(self.group_sizes))


def active_of(group: np.ndarray, slots: np.ndarray, groups: int) -> Active:
    """What rows of these groups and slots touch."""
    adapted = slots >= 0
    return Active(
        groups=len(np.unique(group)),
        buckets=len(np.unique(slots[adapted] * groups + group[adapted])),
        slots=len(np.unique(slots[adapted])),
        adapted_rows=int(adapted.sum()),
    )


@dataclasses.dataclass(frozen=True)
class Choices:
    """Tokens, and the distinct experts of each: int32 experts [tokens, k], slots [tokens]."""

    experts: np.ndarray
    slots: np.ndarray
    groups: int

    @property
    def active(self) -> Active:
        group, slots = self.experts.reshape(-1), np.repeat(self.slots, self.experts.shape[1])
        return active_of(group, slots, self.groups)


def random_choices(groups: int, tokens: int, top_k: int, slots: int) -> Choices:
    """Uniform experts, and a random slot for each token; 0 slots: no token has an adapter."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((tokens, groups)), axis=1)[:, :top_k]
    slot = rng.integers(0, slots, tokens) if slots else np.full(tokens, -1)
    return Choices(experts.astype(np.int32), slot.astype(np.int32), groups)


def random_rows(groups: int, rows: int, slots: int) -> Rows:
    """Groups of random size, and a random slot for each row; 0 slots: no row has an adapter."""
    group = np.random.default_rng(0).integers(0, groups, rows)
    slot = np.full(rows, -1)
    if slots:
        slot = np.random.default_rng(1).integers(0, slots, rows)
    order = np.lexsort((slot, group))
    sizes = np.bincount(group, minlength=groups)
    return Rows(sizes.astype(np.int32), slot[order].astype(np.int32))
