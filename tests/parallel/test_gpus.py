"""Heads and experts of real models, by the kernels, on two GPUs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from lora_moe_jax.bench.serving import Load, build_engine
from lora_moe_jax.config.named import named_config
from tests.serving.helpers import bits, greedy, prompts, sampled

LENGTHS = 5, 130, 1, 64, 300, 17, 33, 480
OUTPUT = 24


@pytest.mark.gpu
@pytest.mark.parametrize("axis", ["tensor", "expert"])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v2-lite"])
def test_requests_have_the_bits_that_they_have_alone(model, axis):
    """Sampled alone, in threes and all together, and scored; two layers, with and without adapters.

    An engine of two sizes of steps, so that one token's kernels and many's meet.
    """
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    config = named_config(model).first_layers(2)
    loads = [Load("decode", requests, max(LENGTHS), 2) for requests in (1, len(LENGTHS))]
    known = loads, 16, False, "bfloat16", OUTPUT, 1, {axis: 2}
    engine, _ = build_engine(config, *known)
    texts = prompts(LENGTHS, vocab=config.vocab_size)
    names = [None, "0", "1", "0", "1", None, "0", "1"]
    params = [(sampled(i, OUTPUT), greedy(OUTPUT))[i % 2] for i in range(len(texts))]
    requests = list(zip(texts, params, names, strict=True))

    def generated(count: int):
        """`count` requests at a time."""
        parts = [requests[first : first + count] for first in range(0, len(requests), count)]
        return [out for part in parts for out in engine.generate(*zip(*part, strict=True))]

    together = generated(len(requests))
    assert all(np.isfinite(out.logprobs).all() for out in together)
    for count in 1, 3:
        assert list(map(bits, generated(count))) == list(map(bits, together)), count
    sequences = [out.prompt_token_ids + out.token_ids for out in together]
    for out, score in zip(together, engine.score(sequences, names), strict=True):
        np.testing.assert_array_equal(score.logprobs[-OUTPUT:], np.float32(out.logprobs))
