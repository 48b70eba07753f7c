"""The kernel for GPUs: a program has one token; each choice is two reductions of a warp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.apart import apart
from pallas_kernels.top_experts.xla import SIGMOID_EPSILON, Scoring

EXPERTS_OF_WARP = 256  # more are shared by several


def top_experts(logits, bias, top_k: int, scoring: Scoring):
    """See `api.top_experts`."""
    tokens, count = logits.shape
    # Triton's blocks are powers of two; what lies past a row's end is masked.
    width, choices = pl.next_power_of_2(count), pl.next_power_of_2(top_k)
    rows, chosen = (pl.BlockSpec((1, its), lambda i: (i, 0)) for its in (width, choices))
    biases = [] if bias is None else [bias]
    call = pl.pallas_call(
        functools.partial(_kernel, count, top_k, scoring),
        out_shape=[jax.ShapeDtypeStruct((tokens, top_k), t) for t in (jnp.int32, jnp.float32)],
        grid=(tokens,),
        in_specs=[rows, *[pl.BlockSpec((width,), lambda i: (0,)) for _ in biases]],
        out_specs=[chosen, chosen],
        compiler_params=plgpu.CompilerParams(num_warps=max(1, width // EXPERTS_OF_WARP)),
        interpret=jax.default_backend() == "cpu",
        name="top_experts",
    )
    return tuple(call(logits, *biases))


def _kernel(count: int, top_k: int, scoring: Scoring, logits, *refs):
    *biases, experts_out, weights_out = refs
    width, choices = logits.shape[1], experts_out.shape[1]
    expert = lax.broadcasted_iota(jnp.int32, (1, width), 1)
    choice = lax.broadcasted_iota(jnp.int32, (1, choices), 1)
    real = expert < count
    loaded = plgpu.load(logits, mask=real, other=-jnp.inf).astype(jnp.float32)
    scores = _score(loaded, scoring)
    compared = scores
    for bias in biases:
        compared = compared + plgpu.load(bias, mask=real[0], other=0)[None]
    # NaN, which equals nothing, is above all. What is taken is not marked by a score: experts may
    # have any, -inf too.
    compared = apart(jnp.where(compared == compared, compared, jnp.inf))
    free = real
    experts = jnp.zeros((1, choices), jnp.int32)
    weights = jnp.zeros((1, choices), jnp.float32)
    for number in range(top_k):
        best = jnp.where(free, compared, -jnp.inf).max(axis=1, keepdims=True)
        first = jnp.where(free & (compared == best), expert, width).min(axis=1, keepdims=True)
        here = expert == first
        its = jnp.where(here, scores, 0.0).sum(axis=1, keepdims=True)
        experts = jnp.where(choice == number, first, experts)
        weights = jnp.where(choice == number, its, weights)
        free = free & ~here
    if scoring.normalise:
        epsilon = SIGMOID_EPSILON if scoring.sigmoid else 0.0
        weights = weights / (weights.sum(axis=1, keepdims=True) + epsilon)
    used = choice < top_k
    plgpu.store(experts_out, experts, mask=used)
    plgpu.store(weights_out, weights * scoring.scale, mask=used)


def _score(logits, scoring: Scoring):
    if scoring.sigmoid:
        return 1.0 / (1.0 + jnp.exp(-logits))
    exponentials = jnp.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)
