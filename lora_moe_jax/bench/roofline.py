"""The least time a product or layer can take on a card: real rows only, every operand once.

Two ceilings, measured on the card: of an H200, which stands for all that are not named here, 790
TFLOP/s of bfloat16 and a copy at 4.3 TB/s. (A stream that only reads reaches 4.69 TB/s, so a
product that mostly reads weights may come out below 1 x.)
What counts: the weights of groups that have a row, once; x and y; A and B of the buckets that have
a row, once. The intermediate u of the low-rank product does not count.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from pallas_kernels.shapes import ExpertShape, ProductShape

ITEM = 2  # bytes of a bfloat16


class Ceilings(NamedTuple):
    """What a card reaches, per second: operations on bfloat16, bytes through its memory."""

    flops: float
    bytes: float


H200 = Ceilings(790e12, 4.3e12)
OTHERS = {"NVIDIA H100 80GB HBM3": Ceilings(790e12, 3.0e12)}


def ceilings() -> Ceilings:
    """Of the first device."""
    return OTHERS.get(jax.devices()[0].device_kind, H200)


@dataclasses.dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes through device memory."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def seconds(self) -> float:
        """On this machine's device."""
        return self.seconds_of(ceilings())

    def seconds_of(self, card: Ceilings) -> float:
        return max(self.flops / card.flops, self.bytes / card.bytes)


@dataclasses.dataclass(frozen=True)
class Active:
    """How much of the weights and adapters a batch touches.

    Attributes:
      groups: groups with a row.
      buckets: (group, slot) pairs with a row.
      slots: slots with a row.
      adapted_rows: rows with an adapter.
    """

    groups: int
    buckets: int = 0
    slots: int = 0
    adapted_rows: int = 0


def product(shape: ProductShape, rows: int, active: Active, out_width: int | None = None) -> Work:
    """y = x · W. `out_width` is y's width where a gate makes it narrower than W."""
    written = rows * (shape.n if out_width is None else out_width)
    return Work(
        2 * rows * shape.k * shape.n,
        ITEM * (active.groups * shape.k * shape.n + rows * shape.k + written),
    )


def lora(
    shape: ProductShape,
    rank: int,
    active: Active,
    *,
    shared_a: bool = False,
    shared_b: bool = False,
) -> Work:
    """What adapters on every part of the product add. A shared factor is one for all groups."""
    parts = len(shape.parts)
    a = (active.slots if shared_a else active.buckets) * rank * shape.k * parts
    b = (active.slots if shared_b else active.buckets) * rank * shape.n
    return Work(2 * active.adapted_rows * rank * (parts * shape.k + shape.n), ITEM * (a + b))


def layer(shape: ExpertShape, tokens: int, rows: int, active: Active, rank: int = 0) -> Work:
    """A whole MoE layer: x and the result once a token, the activation once a row."""
    weights = 3 * shape.hidden * shape.intermediate
    factors = 3 * rank * (shape.hidden + shape.intermediate)
    moved = 2 * tokens * shape.hidden + rows * shape.intermediate
    return Work(
        2 * (rows * weights + active.adapted_rows * factors),
        ITEM * (active.groups * weights + active.buckets * factors + moved),
    )


def training(shape: ExpertShape, rows: int, rank: int) -> float:
    """Useful FLOPs of forward and backward of an expert MLP whose base is frozen.

    Base: y and dx. Adapters: forward, and for the backward twice that (the gradient of u and dx's
    term; dA and dB). What an implementation computes again does not count.
    """
    base = 2 * rows * 3 * shape.hidden * shape.intermediate
    adapters = 2 * rows * 3 * rank * (shape.hidden + shape.intermediate)
    return 2 * base + 3 * adapters
