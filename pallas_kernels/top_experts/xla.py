"""Plain JAX: the definition."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.apart import apart
from pallas_kernels.row_reduce.api import row_sum

SIGMOID_EPSILON = 1e-20  # of DeepSeek-V3: scores that are all zero have weights


class Scoring(NamedTuple):
    """How logits become weights.

    Attributes:
      sigmoid: of each logit; else the softmax over a token's experts.
      normalise: weights of the chosen experts add up to `scale`.
      scale: multiplies the weights.
    """

    sigmoid: bool = False
    normalise: bool = True
    scale: float = 1.0


def top_experts(logits, bias, top_k: int, scoring: Scoring):
    """See `api.top_experts`."""
    scores = score(logits, scoring)
    _, experts = lax.top_k(scores if bias is None else scores + bias, top_k)
    return experts, weights_of(scores, experts, scoring)


def score(logits, scoring: Scoring):
    """Each expert's score, float32."""
    logits = logits.astype(jnp.float32)
    if scoring.sigmoid:
        return _sigmoid(logits)
    # The maximum cancels out, in the gradient too.
    below = apart(logits - lax.stop_gradient(logits.max(-1, keepdims=True)))
    exponentials = jnp.exp(below)
    return exponentials / row_sum(exponentials)


def _sigmoid(x):
    """1 / (1 + exp(-x)), by an exponential that is never infinite."""
    exponential = apart(jnp.exp(-jnp.abs(x)))
    return jnp.where(x < 0, exponential, 1.0) / (1.0 + exponential)


def weights_of(scores, experts, scoring: Scoring):
    """What chosen experts count."""
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if scoring.normalise:
        weights = weights / normaliser(weights, scoring)
    return weights * scoring.scale


def normaliser(chosen, scoring: Scoring):
    """What the scores of chosen experts are divided by."""
    return row_sum(chosen) + (SIGMOID_EPSILON if scoring.sigmoid else 0.0)
