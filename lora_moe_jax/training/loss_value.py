"""A loss's value and its gradient by logprobs, for the sequences of one adapter."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lora_moe_jax.errors import RequestError
from lora_moe_jax.training.datum import Row
from lora_moe_jax.training.losses import Loss, LossBatch, LossFunction

MOST_LOSSES = 32  # that are kept compiled: one that is defined anew for each batch is another
SHORTEST = 16  # tokens: arrays are padded to powers of two, so that few shapes are compiled


class Evaluated(NamedTuple):
    """A loss and its gradient by logprobs, which may still be under way on the device.

    Attributes:
      value: float32 []. gradient: float32 [D, L] of rows that are padded.
    """

    rows: list[Row]
    value: jax.Array
    gradient: jax.Array

    def read(self) -> tuple[float, list[np.ndarray]]:
        """The loss, and its gradient by each row's logprobs; waits for both."""
        own = zip(self.rows, np.asarray(self.gradient)[: len(self.rows)], strict=True)
        return float(self.value), [one[: row.length - 1] for row, one in own]


def value_and_gradient(
    loss: Loss, options: dict[str, np.float32], rows: list[Row], logprobs: list[np.ndarray]
) -> Evaluated:
    """Begins to compute the loss of an adapter's rows, and its gradient by their logprobs.

    Raises:
      RequestError: what the loss returns is neither [D, L] nor one number, or rows do not pair up.
    """
    if loss.pairs and len(rows) % 2:
        raise RequestError(
            "the loss compares pairs of sequences of one adapter",
            key="batch",
            expected=f"an even number of sequences of {rows[0].adapter}",
            found=len(rows),
        )
    count = _power_of_two(len(rows), 2)
    shape = count, _power_of_two(max(row.length - 1 for row in rows), SHORTEST)

    def stacked(arrays: list[np.ndarray], dtype=np.float32) -> np.ndarray:
        array = np.zeros(shape, dtype)
        for one, values in zip(array, arrays, strict=False):
            one[: len(values)] = values
        return array

    batch = LossBatch(
        weights=stacked([row.weights for row in rows]),
        mask=stacked([np.ones(row.length - 1, bool) for row in rows], bool),
        inputs={name: stacked([row.inputs[name] for row in rows]) for name in loss.needs},
        options=options,
    )
    found = _compiled(loss.function)(stacked(logprobs), batch)
    for array in found:
        array.copy_to_host_async()
    return Evaluated(rows, *found)


@functools.lru_cache(MOST_LOSSES)
def _compiled(function: LossFunction):
    @jax.jit
    def value_and_gradient(logprobs, batch: LossBatch):
        def total(logprobs):
            loss = _checked(function(logprobs, batch), logprobs)
            return loss if loss.ndim == 0 else jnp.sum(jnp.where(batch.mask, loss, 0))

        return jax.value_and_grad(total)(logprobs)

    return value_and_gradient


def _checked(found: object, logprobs: jax.Array) -> jax.Array:
    array = isinstance(found, jax.Array | np.ndarray | np.generic | float)
    found = jnp.asarray(found) if array else found
    if array and found.shape in ((), logprobs.shape) and jnp.issubdtype(found.dtype, jnp.floating):
        return found
    raise RequestError(
        "the loss has a wrong shape",
        key="loss",
        expected=f"one number, or one for each token: float32 {list(logprobs.shape)}",
        found=f"{found.dtype} {list(found.shape)}" if array else str(found)[:200],
    )


def _power_of_two(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())
