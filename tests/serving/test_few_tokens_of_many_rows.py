"""A step of fewer tokens than the engine has rows computes the logits of as many as it has tokens.

Where the rest of the rows are is another matter: every request keeps its own, and its bits.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from lora_moe_jax import Engine
from tests.adapters.tables import GOLDEN
from tests.pallas_kernels.test_grouped_cost import results
from tests.serving.conftest import OPTIONS
from tests.serving.helpers import bits, greedy, load_golden, prompts, sampled

pytestmark = pytest.mark.slow  # it compiles an engine of its own

FAMILY, ROWS, FEW = "qwen3_moe", 20, 8
NAMES = [None, "attn", "rslora", "attn"]
SIZES = OPTIONS | {"token_buckets": [FEW, 48], "max_requests": ROWS, "max_adapters": 3}


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = Engine.from_pretrained(GOLDEN / FAMILY / "base", **SIZES)
    load_golden(made, FAMILY, ["attn", "rslora"])
    return made


def settings() -> list:
    """Of five requests, two of which need more than a step: filters and the most likely tokens."""
    every = [greedy(6), sampled(1, 9), sampled(2, 12, top_k=4), greedy(15, logprobs=3)]
    return [*every, sampled(3, 20, temperature=0.6, min_p=0.05)]


def test_few_requests_have_the_bits_that_they_have_among_many(engine):
    """All rows begin; those that are left at the end are far apart, and few."""
    few = settings()
    many = [sampled(10 + i, 3) for i in range(3 * (len(few) - 1))]
    # A request of `few` in every fourth row.
    params = [few[i // 4] if i % 4 == 0 else many[i - i // 4 - 1] for i in range(4 * len(few) - 3)]
    texts = prompts([3 + i % 5 for i in range(len(params))], seed=4)
    names = [NAMES[i % 3] for i in range(len(params))]
    together = engine.generate(texts, params, names)
    for i in range(0, len(params), 4):
        (alone,) = engine.generate([texts[i]], params[i], names[i])
        assert bits(alone) == bits(together[i]) and alone.top_logprobs == together[i].top_logprobs
        (score,) = engine.score([texts[i] + alone.token_ids], [names[i]])
        assert np.array_equal(score.logprobs[len(texts[i]) - 1 :], np.float32(alone.logprobs))


def test_a_step_computes_as_many_logits_as_it_has_tokens(engine):
    """Of all rows there is only the array that keeps what was sampled from."""
    steps, vocab = engine._runner.steps, engine.config.vocab_size
    job = steps._step_job(FEW)
    function = functools.partial(job.function, engine.arrays)
    traced = jax.make_jaxpr(function)(engine.arrays.base, engine.bank.stacks, *job.inputs)
    computed = list(results(traced.jaxpr))
    assert [name for name, shape in computed if shape == (ROWS, vocab)] == ["scatter"]
    assert (FEW, vocab) in {shape for _, shape in computed}
