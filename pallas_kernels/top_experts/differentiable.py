"""`top_experts` of any backend with the gradient of the plain one's weights."""

from __future__ import annotations

import functools
from types import ModuleType

import jax

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
    logits, experts = saved

    def weights(logits):
        return xla.weights_of(xla.score(logits, scoring), experts, scoring)

    return *jax.vjp(weights, logits)[1](gradients[1]), None


top_experts.defvjp(_forward, _backward)
