"""Checks of what callers pass to the engine; each failure is a RequestError naming the argument."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_jax.errors import RequestError
from lora_moe_jax.serving.sampling_params import MAX_LOGPROBS, SamplingParams

_ONE = {"params": "SamplingParams", "adapters": "a name or None", "priority": "an integer"}


def sequence_of_prompts(prompts, key: str = "prompts") -> list:
    """A list of prompts; a lone string or list of token ids is a common slip."""
    if isinstance(prompts, np.ndarray):
        prompts = list(prompts)
    lone_tokens = isinstance(prompts, Sequence) and any(_is_int(item) for item in prompts)
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence) or lone_tokens:
        raise RequestError(
            f"{key} must be a list, one entry for each request",
            key=key,
            expected="a list of strings or of lists of token ids",
            found="a list of token ids" if lone_tokens else type(prompts).__name__,
            hint="put a single prompt into a list",
        )
    return list(prompts)


def token_ids(prompt, key: str, vocab_size: int) -> list[int]:
    """Checked token ids as Python integers."""
    flat = isinstance(prompt, Sequence) or (isinstance(prompt, np.ndarray) and prompt.ndim == 1)
    if not flat or isinstance(prompt, str | bytes):
        raise RequestError(
            "a prompt must be a string or token ids",
            key=key,
            expected="a string or a list of integers",
            found=type(prompt).__name__,
        )
    if len(prompt) == 0:
        raise RequestError("a prompt is empty", key=key, expected="at least one token", found="0")
    tokens = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
    # One look at each of thousands in Python is a millisecond that a prompt waits.
    if set(map(type, tokens)) == {int} and 0 <= min(tokens) and max(tokens) < vocab_size:
        return tokens
    for i, token in enumerate(prompt):
        if not _is_int(token) or not 0 <= token < vocab_size:
            raise RequestError(
                "a token id is out of range",
                key=f"{key}[{i}]",
                expected=f"an integer from 0 to {vocab_size - 1}",
                found=repr(token),
            )
    return [int(token) for token in prompt]


def one_each(key: str, values, count: int) -> list:
    """A list with an entry for each request; a single value or None stands for all of them."""
    if values is None or isinstance(values, str | SamplingParams) or _is_int(values):
        return [values] * count
    if not isinstance(values, Sequence) or len(values) != count:
        if isinstance(values, Sequence):
            expected, found = count, len(values)
        else:
            expected = f"{_ONE[key]}, or a list of {count}, one for each prompt"
            found = type(values).__name__
        raise RequestError(
            f"{key} must have one entry for each prompt",
            key=key,
            expected=str(expected),
            found=found,
        )
    return list(values)


def priority(value, key: str) -> int:
    """A priority as a Python integer."""
    if not _is_int(value):
        raise RequestError(
            "a priority must be an integer",
            key=key,
            expected="an integer; the smaller, the earlier",
            found=repr(value)[:200],
        )
    return int(value)


def alternatives(value, key: str, limit: int) -> None:
    """A number of most likely tokens that this engine can return."""
    if not _is_int(value) or not 0 <= value <= limit:
        raise RequestError(
            "this is no number of most likely tokens that the engine can return",
            key=key,
            expected=f"an integer from 0 to {limit}",
            found=repr(value)[:200],
            hint="build the engine with a larger max_logprobs" if limit < MAX_LOGPROBS else None,
        )


def params(value, key: str, *, has_text: bool, max_logprobs: int, vocab_size: int) -> None:
    """Settings that this engine can follow."""
    if not isinstance(value, SamplingParams):
        raise RequestError(
            "sampling settings must be SamplingParams", key=key, found=type(value).__name__
        )
    if value.stop and not has_text:
        raise RequestError(
            "stop strings need a tokenizer",
            key=f"{key}.stop",
            expected="tokenizer.json in the model folder",
            found="none",
            hint="use stop_token_ids",
        )
    unknown = [token for token in value.stop_token_ids if token >= vocab_size]
    if unknown:
        raise RequestError(
            "a token that is to stop is none of the model's",
            key=f"{key}.stop_token_ids",
            expected=f"integers from 0 to {vocab_size - 1}",
            found=unknown[0],
        )
    alternatives(value.logprobs or 0, f"{key}.logprobs", max_logprobs)


def _is_int(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)
