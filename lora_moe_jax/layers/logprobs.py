"""Logprobs of chosen tokens: the one path that sampling, scoring and training share."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import log_sum_exp


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]
) -> Float[Array, " rows"]:
    """log softmax(logits)[row, token]; a row's bits depend on the row alone."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return chosen - log_sum_exp(logits)
