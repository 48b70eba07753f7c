"""Checks of what a trainer is given."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from lora_moe_jax.errors import ConfigError, RequestError
from lora_moe_jax.serving.engine import Engine


def check_engine(engine: Engine) -> None:
    """Raises ConfigError for an engine whose adapters cannot be trained."""
    if engine.options.max_adapters == 0:
        hint = "build the engine with a larger max_adapters"
        raise _cannot_train("max_adapters", "at least 1, for adapter slots", 0, hint)
    if (mesh := engine.arrays.mesh) is not None:
        hint = "build the engine without a mesh, even one of one device"
        raise _cannot_train("mesh", "an engine without a mesh", dict(mesh.shape), hint)


def _cannot_train(key: str, expected: str, found: object, hint: str) -> ConfigError:
    return ConfigError(
        "this engine cannot train", key=key, expected=expected, found=found, hint=hint
    )


def buckets_of(sizes: object) -> list[int]:
    """The sizes of flat batches, ascending; raises ConfigError."""
    good = isinstance(sizes, Sequence) and sizes and all(type(s) is int and s > 1 for s in sizes)
    if not good:
        raise ConfigError(
            "a trainer option is out of range",
            key="token_buckets",
            expected="a list of numbers of tokens",
            found=repr(sizes)[:200],
        )
    return sorted(set(sizes))


def names_of(names: object) -> list[str]:
    """One name, or several, each once; raises RequestError."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise RequestError(
            "these are no adapters", key="names", expected="names", found=repr(names)[:200]
        )
    return list(dict.fromkeys(names))


def check_step_settings(learning_rate: object, weight_decay: object, clip_norm: object) -> None:
    """Raises RequestError for a setting of `optim_step` that is out of range.

    What a schedule gives is known in its step only.
    """
    if not callable(learning_rate):
        checked_number("learning_rate", learning_rate)
    checked_number("weight_decay", weight_decay, 0.0)
    if clip_norm is not None:
        checked_number("clip_norm", clip_norm, 0.0)


def checked_number(key: str, value: object, least: float | None = None) -> float:
    """A finite number, at least so large; raises RequestError."""
    number = isinstance(value, int | float | np.floating | np.integer | jax.Array)
    if (
        not number
        or np.ndim(value)
        or not np.isfinite(value)
        or (least is not None and value < least)
    ):
        raise RequestError(
            "a setting of the step is out of range",
            key=key,
            expected="a finite number" + ("" if least is None else f" of at least {least}"),
            found=repr(value)[:200],
        )
    return float(value)
