"""How a parameter is made from checkpoint tensors, and split back into them."""

from __future__ import annotations

import itertools
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
    """Tensors one under the other: one product for all of them.

    For each of `devices` its rows of the tensors that are `split`, and all rows of the others, so
    that an even split of the whole gives each device what it needs.

    Attributes:
      heights: rows of each tensor.
    """

    heights: tuple[int, ...]
    split: tuple[bool, ...]
    devices: int = 1

    @property
    def local_heights(self) -> tuple[int, ...]:
        """Rows of each tensor on one device."""
        return tuple(
            height // self.devices if split else height
            for height, split in zip(self.heights, self.split, strict=True)
        )

    def load(self, *tensors):
        shares = [
            np.split(tensor, self.devices) if split else [tensor] * self.devices
            for tensor, split in zip(tensors, self.split, strict=True)
        ]
        return np.concatenate([share for device in zip(*shares, strict=True) for share in device])

    def store(self, parameter):
        ends = np.cumsum(self.local_heights)[:-1]
        of_devices = [np.split(share, ends) for share in np.split(parameter, self.devices)]
        return tuple(
            np.concatenate(shares) if split else shares[0]
            for shares, split in zip(zip(*of_devices, strict=True), self.split, strict=True)
        )


@dataclass(frozen=True)
class ZerosElsewhere:
    """Vectors one after the other, with zeros in the place of tensors that a checkpoint has not.

    Attributes:
      given: which of the whole's tensors there are.
    """

    whole: Concatenated
    given: tuple[bool, ...]

    def load(self, *tensors):
        found = iter(tensors)
        return self.whole.load(
            *(
                next(found) if given else np.zeros(height, tensors[0].dtype)
                for height, given in zip(self.whole.heights, self.given, strict=True)
            )
        )

    def store(self, parameter):
        return tuple(itertools.compress(self.whole.store(parameter), self.given))


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape along a new first axis (gate and up)."""

    def load(self, *tensors):
        return np.stack(tensors)

    def store(self, parameter):
        return tuple(parameter)
