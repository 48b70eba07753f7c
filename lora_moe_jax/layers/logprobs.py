"""Logprobs of chosen tokens: the one path that sampling, scoring and training share."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lora_moe_jax.layers.reduce import row_sum

VOCAB_CHUNK = 1024


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]
) -> Float[Array, " rows"]:
    """log softmax(logits)[row, token], over chunks of the vocabulary in a fixed order."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return chosen - log_sum_exp(logits)


def log_sum_exp(logits: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    """A running maximum and sum over chunks, so that a row's bits depend on the row alone."""
    rows, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % VOCAB_CHUNK)), constant_values=-jnp.inf)

    def chunk(i, carry):
        maximum, total = carry
        part = lax.dynamic_slice_in_dim(padded, i * VOCAB_CHUNK, VOCAB_CHUNK, axis=1)
        new_maximum = jnp.maximum(maximum, part.max(-1))
        total = total * jnp.exp(maximum - new_maximum)
        return new_maximum, total + row_sum(jnp.exp(part - new_maximum[:, None]))[:, 0]

    # Finite, so that a chunk of -inf alone does not make the correction exp(-inf + inf).
    lowest = jnp.full(rows, jnp.finfo(logits.dtype).min, logits.dtype)
    carry = (lowest, jnp.zeros(rows, logits.dtype))
    maximum, total = lax.fori_loop(0, padded.shape[1] // VOCAB_CHUNK, chunk, carry)
    return maximum + jnp.log(total)
