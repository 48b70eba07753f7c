"""Logprobs of chosen tokens: the one path that sampling, scoring and training share."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import log_sum_exp


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]
) -> Float[Array, " rows"]:
    """log softmax(logits)[row, token]; a row's bits depend on the row alone."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return chosen - log_sum_exp(logits)


def top_logprobs(
    logits: Float[Array, "rows vocab"], count: int
) -> tuple[Int[Array, "rows count"], Float[Array, "rows count"]]:
    """The `count` most likely tokens and their logprobs, the bits that `token_logprobs` gives.

    Of tokens with equal logits the lower ids come first.
    """
    # To top_k -0 is less than 0.
    _, ids = lax.top_k(jnp.where(logits == 0, 0.0, logits), count)
    return ids, jnp.take_along_axis(logits, ids, axis=1) - log_sum_exp(logits)[:, None]
