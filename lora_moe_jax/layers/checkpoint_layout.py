"""How a parameter is made from checkpoint tensors, and split back into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class CheckpointLayout(Protocol):
    """Converts between a parameter and the checkpoint tensors it comes from."""

    def load(self, *tensors: np.ndarray) -> np.ndarray: ...

    def store(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]: ...


@dataclass(frozen=True)
class AsStored:
    """The parameter is the tensor."""

    def load(self, tensor):
        return tensor

    def store(self, parameter):
        return (parameter,)


AS_STORED = AsStored()


@dataclass(frozen=True)
class Concatenated:
    """Tensors of these heights, one under the other: one product for all of them."""

    heights: tuple[int, ...]

    def load(self, *tensors):
        return np.concatenate(tensors)

    def store(self, parameter):
        return tuple(np.split(parameter, np.cumsum(self.heights)[:-1]))


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape along a new first axis (gate and up)."""

    def load(self, *tensors):
        return np.stack(tensors)

    def store(self, parameter):
        return tuple(parameter)
