"""Checks of what a trainer is given."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import optax

from lora_moe_jax.errors import ConfigError, RequestError
from lora_moe_jax.serving.engine import Engine

LARGEST = float(np.finfo(np.float32).max)


def check_engine(engine: Engine) -> None:
    """Raises ConfigError for an engine whose adapters cannot be trained, or what is no engine."""
    if not isinstance(engine, Engine):
        hint = "Engine.from_pretrained makes one"
        raise _cannot_train("engine", "an Engine", type(engine).__name__, hint)
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


def optimizer_of(optimizer: object) -> optax.GradientTransformation:
    """How gradients are scaled, by default as Adam does; raises ConfigError."""
    if optimizer is None:
        return optax.scale_by_adam()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            "a trainer option is out of range",
            key="optimizer",
            expected="an optax.GradientTransformation, such as optax.scale_by_adam()",
            found=repr(optimizer)[:200],
        )
    return optimizer


def check_moments(moments: optax.OptState) -> None:
    """Raises ConfigError for a state of an optimizer that could not be saved."""
    for leaf in jax.tree.leaves(moments):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ConfigError(
                "the optimizer's state cannot be saved",
                key="optimizer",
                expected="arrays of numbers",
                found=str(leaf.dtype),
                hint="leave out what draws random numbers, as optax.add_noise does",
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
        checked_number("learning_rate", learning_rate, 0.0)
    checked_number("weight_decay", weight_decay, 0.0)
    if clip_norm is not None:
        checked_number("clip_norm", clip_norm, 0.0)


def checked_number(key: str, value: object, least: float | None = None) -> float:
    """A number that is finite in float32, at least so large; raises RequestError."""
    is_number = isinstance(value, int | float | np.floating | np.integer | jax.Array)
    finite = is_number and not np.ndim(value) and abs(value) <= LARGEST
    if not finite or (least is not None and value < least):
        expected = "a number that is finite in float32"
        raise RequestError(
            "a setting is out of range",
            key=key,
            expected=expected + ("" if least is None else f", of at least {least}"),
            found=repr(value)[:200],
        )
    return float(value)
