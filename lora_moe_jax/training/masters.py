"""The float32 parameters of one adapter in training, and their first values."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from lora_moe_jax.adapters.adapter import LoraPair
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.training.config import LoraConfig, PairShape


class Master(NamedTuple):
    """The factors of one projection, float32: a `[groups or 1, rank, in]`, b `[…, rank, out]`."""

    a: jax.Array | np.ndarray
    b: jax.Array | np.ndarray


Masters = dict[str, Master]  # by `Projection.name`


def initial_masters(
    config: LoraConfig, shapes: Mapping[str, PairShape], projections: Mapping[str, Projection]
) -> Masters:
    """The first values of every pair on the host, see `LoraConfig.init`.

    Rows at and past an expert's own rank are zero in both factors. Then so are their gradients, and
    they stay zero.
    """
    masters = {}
    for name, shape in shapes.items():
        random = np.random.default_rng([config.seed, zlib.crc32(name.encode())])
        if projections[name].kind == "embedding":
            b = random.standard_normal(shape.b, np.float32)
            masters[name] = Master(np.zeros(shape.a, np.float32), b)
            continue
        a = _random(random, shape.a, config.init)
        inside = np.arange(shape.a[1]) < shape.ranks[:, None]
        if not inside.all():
            a = np.where(inside[:, :, None], a, np.float32(0))
        masters[name] = Master(a, np.zeros(shape.b, np.float32))
    return masters


def master_shapes(shapes: Mapping[str, PairShape]) -> dict[str, Master]:
    """What `initial_masters` gives, without the values."""
    return {
        name: Master(*(jax.ShapeDtypeStruct(x, np.float32) for x in (shape.a, shape.b)))
        for name, shape in shapes.items()
    }


def _random(random: np.random.Generator, shape: tuple[int, int, int], init: str) -> np.ndarray:
    if init == "gaussian":
        return random.standard_normal(shape, np.float32) / np.float32(shape[1])
    # kaiming_uniform with a = sqrt(5), as torch's linear layers
    bound = np.float32(shape[2] ** -0.5)
    return bound * (2 * random.random(shape, np.float32) - 1)


def lora_pairs(masters: Masters, shapes: Mapping[str, PairShape]) -> dict[str, LoraPair]:
    """The masters as the engine takes them."""
    return {
        name: LoraPair(master.a, master.b, shapes[name].scaling, shapes[name].ranks)
        for name, master in masters.items()
    }
