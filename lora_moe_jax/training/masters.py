"""The float32 parameters of one adapter in training, and their first values.

Pairs of the same shapes lie in one array for all A and one for all B, end to end: a step hands the
device a few arrays of many layers, not thousands (each costs the host 1 to 3 µs). Moments and
gradients have the same form.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from lora_moe_jax.adapters.bank import Place
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.training.config import LoraConfig
from lora_moe_jax.training.pair_shape import PairShape


class Master(NamedTuple):
    """Factors, float32: of one projection a `[groups or 1, rank, in]` and b `[…, rank, out]`.

    Those of several, in `Masters`, have an axis for them in front.
    """

    a: jax.Array | np.ndarray
    b: jax.Array | np.ndarray


Masters = dict[str, Master]  # by the shapes of the pairs, as `Stacks` names them


class Stacks:
    """Which projections an adapter has pairs for, and where they lie in its `Masters`.

    Attributes:
      shapes: of the pairs, by `Projection.name`.
      names: of the projections of each stack, in their order there.
      places: of each projection: its stack, and its index there.
    """

    def __init__(self, shapes: Mapping[str, PairShape]):
        self.shapes = dict(shapes)
        self.names: dict[str, list[str]] = {}
        self.places: dict[str, Place] = {}
        for name, shape in self.shapes.items():
            stack = " ".join("×".join(map(str, side)) for side in (shape.a, shape.b))
            names = self.names.setdefault(stack, [])
            self.places[name] = Place(stack, len(names))
            names.append(name)

    def like(self) -> Masters:
        """The shapes of masters."""
        found = {}
        for stack, names in self.names.items():
            sides = self.shapes[names[0]].a, self.shapes[names[0]].b
            arrays = (jax.ShapeDtypeStruct((len(names), *x), np.float32) for x in sides)
            found[stack] = Master(*arrays)
        return found

    def join(self, factors: Callable[[str], Master]) -> Masters:
        """Masters on the host, of what the function gives for each projection."""
        like = self.like()
        found = {s: Master(*(np.empty(x.shape, x.dtype) for x in like[s])) for s in like}
        for name, (stack, index) in self.places.items():
            for into, side in zip(found[stack], factors(name), strict=True):
                into[index] = side
        return found

    def split(self, masters: Masters) -> dict[str, Master]:
        """The factors of every projection, on the host."""
        host = jax.device_get(masters)
        return {
            name: Master(host[stack].a[index], host[stack].b[index])
            for name, (stack, index) in self.places.items()
        }

    def scalings(self) -> dict[str, np.ndarray]:
        """float32 `[projections, groups or 1]` of each stack."""
        return {
            stack: np.stack([self.shapes[name].scaling for name in names])
            for stack, names in self.names.items()
        }


def initial_masters(
    config: LoraConfig, stacks: Stacks, projections: Mapping[str, Projection]
) -> Masters:
    """The first values of every pair on the host, see `LoraConfig.init`."""
    return stacks.join(functools.partial(_first_values, config, stacks.shapes, projections))


def _first_values(
    config: LoraConfig,
    shapes: Mapping[str, PairShape],
    projections: Mapping[str, Projection],
    name: str,
) -> Master:
    shape, random = shapes[name], np.random.default_rng([config.seed, zlib.crc32(name.encode())])
    if projections[name].kind == "embedding":
        b = random.standard_normal(shape.b, np.float32)
        return Master(np.zeros(shape.a, np.float32), b)
    a = _random(random, shape.a, config.init)
    return Master(within_ranks(a, shape.ranks), np.zeros(shape.b, np.float32))


def within_ranks(factor: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """A factor `[groups or 1, rank, …]` with zeros at and past each group's own rank.

    With such rows zero in both factors their gradients are, and they stay zero.
    """
    inside = np.arange(factor.shape[1]) < ranks[:, None]
    return factor if inside.all() else np.where(inside[:, :, None], factor, np.float32(0))


def _random(random: np.random.Generator, shape: tuple[int, int, int], init: str) -> np.ndarray:
    if init == "gaussian":
        return random.standard_normal(shape, np.float32) / np.float32(shape[1])
    # kaiming_uniform with a = sqrt(5), as torch's linear layers
    bound = np.float32(shape[2] ** -0.5)
    return bound * (2 * random.random(shape, np.float32) - 1)
