"""Banks of rank classes: the same adapters in one array of the largest rank, or in one of each."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels import Lora


class RankClass(NamedTuple):
    """How many slots it has, and their rank."""

    slots: int
    rank: int


def ranks_of(classes) -> list[int]:
    """The rank of every slot."""
    return [its.rank for its in classes for _ in range(its.slots)]


def firsts_of(classes) -> tuple[int, ...]:
    """The number of each class's first slot."""
    return tuple(itertools.accumulate((its.slots for its in classes), initial=0))[:-1]


def cut(factor, classes):
    """`[S, G, R, width]` of all slots as the factors of each class."""
    return tuple(
        factor[first : first + its.slots, :, : its.rank]
        for first, its in zip(firsts_of(classes), classes, strict=True)
    )


def padded(factor, classes):
    """The factor with zeros past each slot's rank."""
    own = np.arange(factor.shape[2]) < np.array(ranks_of(classes))[:, None]
    return np.where(own[:, None, :, None], factor, np.zeros((), factor.dtype))


def in_classes(pair: Lora, classes) -> tuple[Lora, ...]:
    """A bank of one class, or its gradient, as one of several."""
    ends = [first + its.slots for first, its in zip(firsts_of(classes), classes, strict=True)]
    scalings = np.split(pair.scaling, ends)[: len(classes)]
    return tuple(map(Lora, cut(pair.a, classes), cut(pair.b, classes), scalings))


def assert_same_products(found, expected):
    """Equal; on a CPU close, where a product's bits depend on how many columns the factors have: in
    which way, on its instructions and on the JAX.
    """
    assert found.dtype == expected.dtype
    if jax.default_backend() == "cpu":
        limit = 1e-5 * np.abs(expected).max(initial=0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit)
    else:
        np.testing.assert_array_equal(found, expected)
