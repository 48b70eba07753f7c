"""What a row becomes does not depend on how many rows there are, bit for bit."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax.layers.choice_bias import bias_of_choices
from lora_moe_jax.layers.embedding import Embedding, OutputHead
from lora_moe_jax.layers.logprobs import token_logprobs
from lora_moe_jax.layers.norm import RmsNorm
from lora_moe_jax.layers.rope import cos_sin
from lora_moe_jax.layers.router import Router
from pallas_kernels import rotate
from pallas_kernels.grouped_lora_matmul.gate import Gate, gated
from tests.layers.modules import MOE, ROPE, build, normal, randomise, slots_of

ROWS, HIDDEN, VOCAB = 704, 48, 2500  # so many that XLA for CPUs compiles loops in another way
SIGMOID = dataclasses.replace(
    MOE, scoring="sigmoid", correction_bias=True, n_group=4, topk_group=2, group_score="top2_sum"
)


@functools.cache
def compiled(dtype):
    make = build(dtype)
    norm = randomise(RmsNorm("norm", HIDDEN, 1e-6, make))
    head_norm = randomise(RmsNorm("q_norm", 16, 1e-6, make))
    softmax = randomise(Router("softmax", HIDDEN, MOE, make))
    sigmoid = randomise(Router("sigmoid", HIDDEN, SIGMOID, make))
    embedding = randomise(Embedding("model.embed_tokens", VOCAB, HIDDEN, make))
    head = randomise(OutputHead("lm_head", HIDDEN, VOCAB, make, tied=True))

    biases = jnp.asarray(normal(MOE.num_experts, HIDDEN, dtype=dtype))

    def biased(experts, weights, dy):
        """With the gradient of the weights."""
        y, pull_back = jax.vjp(lambda weights: bias_of_choices(biases, experts, weights), weights)
        return y, pull_back(dy.astype(y.dtype))

    def run(rows):
        x, slots, positions, tokens = rows
        heads = x.reshape(-1, 3, 16)
        logits = head(x, slots, embedding)
        return {
            "norm": norm(x),
            "head norm": head_norm(heads),
            "softmax": softmax(x, slots),
            "sigmoid": sigmoid(x, slots),
            "bias of choices": biased(*softmax(x, slots), x),
            "rope": rotate(heads[..., : ROPE.dim], *cos_sin(positions, ROPE)),
            "gated": gated(*jnp.split(x, 2, axis=1), Gate()),
            "embedding": embedding(tokens, slots),
            "logits": logits,
            "logprobs": token_logprobs(logits, tokens),
        }

    return jax.jit(run)


@functools.cache
def rows(dtype):
    rng = np.random.default_rng(4)
    return (
        3 * normal(ROWS, HIDDEN, dtype=dtype),
        slots_of(ROWS),
        rng.integers(0, 100_000, ROWS).astype(np.int32),
        rng.integers(0, VOCAB, ROWS).astype(np.int32),
    )


@functools.cache
def results(dtype, start, stop):
    some = tuple(array[start:stop] for array in rows(dtype))
    return jax.tree.map(np.asarray, compiled(dtype)(some))


@pytest.mark.parametrize(
    "dtype, start, stop",
    [
        pytest.param("float32", 5, 6, marks=pytest.mark.slow),
        ("float32", 3, 68),
        ("bfloat16", 5, 6),
    ],
)
def test_layers(dtype, start, stop):
    some, everything = results(dtype, start, stop), results(dtype, 0, ROWS)
    for name in everything:
        values = zip(jax.tree.leaves(some[name]), jax.tree.leaves(everything[name]), strict=True)
        for value, reference in values:
            assert np.array_equal(value, reference[start:stop]), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 64, 100, 127])
def test_layers_at_many_counts(dtype, count):
    test_layers(dtype, ROWS - count, ROWS)
