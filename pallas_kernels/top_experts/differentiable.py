"""`top_experts` of any backend with the gradient of its weights.

Written out, as what XLA makes of sums over experts depends on how many tokens there are.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.apart import apart
from pallas_kernels.row_reduce.api import row_dot
from pallas_kernels.top_experts import xla
from pallas_kernels.top_experts.xla import Scoring


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def top_experts(backend: ModuleType, top_k: int, scoring: Scoring, logits, bias):
    """See `api.top_experts`."""
    return backend.top_experts(logits, bias, top_k, scoring)


def _forward(backend, top_k, scoring, logits, bias):
    experts, weights = backend.top_experts(logits, bias, top_k, scoring)
    return (experts, weights), (logits, experts)


def _backward(backend, top_k, scoring, saved, gradients):
    logits, experts = jax.tree.map(jnp.asarray, saved)
    scores = xla.score(logits, scoring)
    dscores = _of_chosen(scores, experts, gradients[1] * scoring.scale, scoring)
    dscores = jnp.put_along_axis(jnp.zeros_like(scores), experts, dscores, axis=-1, inplace=False)
    if scoring.sigmoid:
        dlogits = dscores * apart(scores * (1.0 - scores))
    else:
        dlogits = scores * (dscores - row_dot(dscores, scores))
    return dlogits.astype(logits.dtype), None


def _of_chosen(scores, experts, dweights, scoring: Scoring):
    """The gradient of the chosen experts' scores from that of their weights, before `scale`."""
    if not scoring.normalise:
        return dweights
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    total = xla.normaliser(chosen, scoring)
    dweights = apart(dweights)
    return (dweights - row_dot(dweights, chosen / total)) / total


top_experts.defvjp(_forward, _backward)
