"""Choosing tokens on the device; every row by itself, with its own key."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PARTS = 128  # of a row, at most, that are looked through at once


class SamplingRows(NamedTuple):
    """Sampling settings of a batch, one entry for each row.

    `seed` and `step` (tokens generated so far) make the row's random key.
    """

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    seed: Int[Array, " rows"]
    step: Int[Array, " rows"]


def sample(
    logits: Float[Array, "rows vocab"], rows: SamplingRows, filters: bool
) -> Int[Array, " rows"]:
    """The most likely token where the temperature is 0, otherwise a sample.

    Filters follow the temperature: top-k, then top-p, then min-p, as in vLLM.

    Args:
      filters: whether any row has one.
    """
    greedy, largest = _largest(logits)
    drawn = rows.temperature > 0
    # Below the largest, so that a small temperature overflows to -inf and never to inf.
    below = logits - largest[:, None]
    kept = below / jnp.where(drawn, rows.temperature, 1)[:, None]
    if filters:
        kept = _filter(kept, rows)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(rows.seed, rows.step, logits.shape[1])
    return jnp.where(drawn, _largest(kept + noise)[0], greedy)


def _largest(values):
    """Where the largest of each row is, the first of several, and what it is.

    By parts of a row: XLA gives a row to one multiprocessor.
    """
    rows, count = values.shape
    size = count // math.gcd(count, PARTS)
    parts = values.reshape(rows, -1, size)
    first = jnp.argmax(parts, axis=-1).astype(jnp.int32)
    largest = jnp.max(parts, axis=-1)
    part = jnp.argmax(largest, axis=-1).astype(jnp.int32)[:, None]
    found = part * size + jnp.take_along_axis(first, part, axis=1)
    return found[:, 0], jnp.take_along_axis(largest, part, axis=1)[:, 0]


def _gumbel(seed, step, count: int):
    # By name: of other generators, which a program may have set for its own, rows depend on others.
    key = jax.random.key(seed.astype(jnp.uint32), impl="threefry2x32")
    key = jax.random.fold_in(key, step)
    return jax.random.gumbel(key, (count,), jnp.float32)


def _filter(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Sets the logits of tokens that are filtered out to -inf; ties with the last kept stay."""
    vocab = logits.shape[-1]
    descending = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(vocab)
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)[:, None]
    in_top_k = rank < k
    probability = jax.nn.softmax(jnp.where(in_top_k, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # A row without top-p keeps its whole tail, whatever the cumulative sum rounds to.
    in_top_p = (before < rows.top_p[:, None]) | (rows.top_p[:, None] >= 1) | (rank == 0)
    in_min_p = probability >= rows.min_p[:, None] * probability[:, :1]
    kept = in_top_k & in_top_p & in_min_p
    last = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= last, logits, -jnp.inf)
