"""`Datum`: one sequence to train an adapter on, and its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lora_moe_jax.errors import RequestError


@dataclass(frozen=True)
class Datum:
    """One sequence of one adapter.

    Everything that belongs to tokens has an entry for each predicted token, as `Score.logprobs`:
    entry i belongs to `tokens[i + 1]`.

    Attributes:
      tokens: token ids of prompt and completion, at least two.
      adapter: the name of the adapter in training that reads them.
      weights: what each token counts in the loss, for a prompt zero. Default: 1.
      inputs: what else the loss asks for, by name: numbers for each token, or one for all.
    """

    tokens: Sequence[int]
    adapter: str
    weights: Sequence[float] | float = 1.0
    inputs: Mapping[str, Sequence[float] | float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Row:
    """A checked `Datum`, and its place in the batch. Arrays int32 `[L]`, float32 `[L - 1]`."""

    place: int
    adapter: str
    tokens: np.ndarray
    weights: np.ndarray
    inputs: dict[str, np.ndarray]

    @property
    def length(self) -> int:
        return len(self.tokens)


def checked_rows(batch: object, vocab: int, longest: int, needs: Sequence[str]) -> list[Row]:
    """The batch's rows.

    Args:
      vocab: token ids are below it.
      longest: most tokens of a sequence.
      needs: the inputs that the loss asks for.

    Raises:
      RequestError: one of them cannot be trained on; the message names it.
    """
    if isinstance(batch, Datum) or not isinstance(batch, Sequence) or not len(batch):
        found = "an empty list" if isinstance(batch, list | tuple) else type(batch).__name__
        raise RequestError("a batch is a list of Datum", key="batch", found=found)
    return [_checked(i, datum, vocab, longest, needs) for i, datum in enumerate(batch)]


def _checked(place: int, datum: object, vocab: int, longest: int, needs: Sequence[str]) -> Row:
    key = f"batch[{place}]"
    if not isinstance(datum, Datum):
        raise RequestError(
            "a batch is a list of Datum", key=key, expected="Datum", found=type(datum).__name__
        )
    tokens = _tokens(f"{key}.tokens", datum.tokens, vocab, longest)
    if not isinstance(datum.adapter, str):
        raise RequestError(
            "a sequence names the adapter that it trains",
            key=f"{key}.adapter",
            expected="a name",
            found=repr(datum.adapter)[:200],
        )
    if not isinstance(datum.inputs, Mapping) or set(needs) - set(datum.inputs):
        raise RequestError(
            "the loss needs inputs that a sequence does not have",
            key=f"{key}.inputs",
            expected=list(needs),
            found=list(datum.inputs) if isinstance(datum.inputs, Mapping) else datum.inputs,
        )
    count = len(tokens) - 1
    inputs = {
        name: _numbers(f"{key}.inputs[{name!r}]", datum.inputs[name], count) for name in needs
    }
    weights = _numbers(f"{key}.weights", datum.weights, count)
    return Row(place, datum.adapter, tokens, weights, inputs)


def _tokens(key: str, tokens: object, vocab: int, longest: int) -> np.ndarray:
    array = _array(tokens)
    if array is not None and array.size == 0:
        array = array.astype(np.int32)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(
            "a sequence consists of token ids", key=key, expected="a list of integers",
            found=repr(tokens)[:200],
        )  # fmt: skip
    if not 2 <= len(array) <= longest:
        short = len(array) < 2
        raise RequestError(
            f"a sequence is too {'short' if short else 'long'}",
            key=key,
            expected=f"2 to {longest} tokens",
            found=len(array),
            hint=None if short else "longer ones need a trainer with larger token_buckets",
        )
    outside = np.flatnonzero((array < 0) | (array >= vocab))
    if len(outside):
        at = int(outside[0])
        raise RequestError(
            "a token id is out of range",
            key=f"{key}[{at}]",
            expected=f"an integer from 0 to {vocab - 1}",
            found=int(array[at]),
        )
    return array.astype(np.int32)


def _numbers(key: str, values: object, count: int) -> np.ndarray:
    array = _array(values)
    is_real = array is not None and np.can_cast(array.dtype, np.complex128, "same_kind")
    if not is_real or array.dtype.kind == "c" or array.shape not in ((), (count,)):
        raise RequestError(
            "these are not numbers for each predicted token",
            key=key,
            expected=f"one number, or {count}: entry i belongs to tokens[i + 1]",
            found=repr(values)[:200] if array is None else f"{array.dtype}{list(array.shape)}",
        )
    with np.errstate(over="ignore"):
        array = np.broadcast_to(array.astype(np.float32), count)
    if not np.isfinite(array).all():
        raise RequestError(
            "a number is not finite", key=key, expected="float32", found=repr(values)[:200]
        )
    return array


def _array(values: object) -> np.ndarray | None:
    """None for what is no array of one kind of numbers."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError):
        return None
