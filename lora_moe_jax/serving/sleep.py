"""Giving an engine's memory on the device to others for a while, and taking it back."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from lora_moe_jax.errors import RequestError

T = TypeVar("T")


class EngineBusyError(RequestError):
    """The engine cannot sleep while requests are unfinished."""


class EngineAsleepError(RequestError):
    """The engine has given its memory away; `Engine.wake` takes it back."""


def free(arrays) -> None:
    """Frees the memory of a tree's arrays; they go on saying what they were."""
    for array in jax.tree.leaves(arrays):
        array.delete()


def renewed(arrays: T) -> T:
    """Zeros like a tree's arrays, which may have been freed."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), arrays)


def nbytes(arrays) -> int:
    """Bytes of a tree's arrays, 0 for those that were freed."""
    return sum(array.nbytes for array in jax.tree.leaves(arrays) if not array.is_deleted())
