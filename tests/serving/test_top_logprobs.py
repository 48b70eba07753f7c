"""The most likely tokens of each place: NumPy's, with the bits that chosen tokens have."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_jax import Engine, RequestError, SamplingParams
from lora_moe_jax.layers.logprobs import token_logprobs, top_logprobs
from tests.serving.helpers import bits, greedy, load_golden, prompts, sampled

FAMILY = "qwen3_moe"
K = 7


TOP = jax.jit(functools.partial(top_logprobs, count=K))
CHOSEN = jax.jit(token_logprobs)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([K, 30, 1500]),
    st.sampled_from([0.1, 3.0, 40.0]),
    st.sampled_from([None, 1, 0]),
)
def test_against_numpy(seed, vocab, spread, decimals):
    """In order of logits, equal ones by id; each with the bits that it has when it is chosen."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((4, vocab))).astype(np.float32)
    if decimals is not None:
        logits = logits.round(decimals)  # many are equal
    ids, values = TOP(logits)
    assert np.array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :K])
    for column in range(K):
        ones = np.asarray(ids[:, column])
        assert np.array_equal(values[:, column], CHOSEN(logits, ones)), "other bits"


# ---- the engine ----------------------------------------------------------------------------------
@pytest.fixture
def one(engine) -> Engine:
    loaded = engine(FAMILY)
    load_golden(loaded, FAMILY)
    return loaded


def expected_tops(logits: np.ndarray, count: int) -> list[list[int]]:
    return np.argsort(-logits, axis=1, kind="stable")[:, :count].tolist()


def test_generated_and_scored_alternatives(one):
    """Mixed counts in one batch; each request's equal those that scoring gives, bit for bit."""
    batch, names = prompts([4, 30, 9, 17, 3]), [None, "attn", "experts", None, "rslora"]
    counts = [20, 0, 3, None, 1]
    params = [
        (greedy if i % 2 else functools.partial(sampled, i))(6, logprobs=count)
        for i, count in enumerate(counts)
    ]
    before = one.stats().compilations
    outs = one.generate(batch, params, names)
    plain = one.generate(batch, [dataclasses.replace(p, logprobs=True) for p in params], names)
    for out, same, count, name in zip(outs, plain, counts, names, strict=True):
        assert out.token_ids == same.token_ids and same.top_logprobs is None
        if count is None:
            assert out.logprobs is None and out.top_logprobs is None
            continue
        assert bits(out) == bits(same)
        if count == 0:
            assert out.top_logprobs is None
            continue
        sequence = out.prompt_token_ids + out.token_ids
        (score,) = one.score([sequence], [name], return_logits=True, top_logprobs=count)
        start = len(out.prompt_token_ids) - 1
        assert len(score.top_logprobs) == len(score.logprobs) == len(sequence) - 1
        assert score.top_logprobs[start:] == out.top_logprobs
        ids = [[token for token, _ in each] for each in score.top_logprobs]
        assert ids == expected_tops(score.logits[:-1], count)
        for place, each in enumerate(score.top_logprobs):
            assert [value for _, value in each] == sorted((v for _, v in each), reverse=True)
            found = dict(each).get(sequence[place + 1])
            assert found is None or found == score.logprobs[place], "other bits"
    greedy_rows = [out for out, p in zip(outs, params, strict=True) if p.temperature == 0]
    for out in greedy_rows:
        for token, logprob, top in zip(
            out.token_ids, out.logprobs or [], out.top_logprobs or [], strict=False
        ):
            assert top[0] == (token, logprob)
    assert one.stats().compilations == before


def test_they_come_with_each_delta(one):
    deltas = list(one.stream(prompts([5]), greedy(4, logprobs=2)))
    assert [d.top_logprobs for d in deltas] == deltas[-1].completion.top_logprobs
    assert all(len(d.top_logprobs) == 2 and d.top_logprobs[0][0] == d.token_id for d in deltas)
    assert all(d.top_logprobs is None for d in one.stream(prompts([5]), greedy(4)))


def test_they_survive_chunks_and_neighbours(one):
    batch = prompts([60, 45, 3])
    alone = [one.score([p], top_logprobs=5)[0].top_logprobs for p in batch]
    one._runner.scheduler.prefill_chunk = 7
    together = one.score(batch, top_logprobs=5)
    assert [score.top_logprobs for score in together] == alone
    assert one.score([[3]], top_logprobs=5)[0].top_logprobs == []
    assert one.score([[3, 4]])[0].top_logprobs is None


def test_what_is_not_wanted_is_not_computed(one, monkeypatch):
    steps, called = one._runner.steps, []
    call = steps._call
    monkeypatch.setattr(
        steps, "_call", lambda name, *inputs: (called.append(name), call(name, *inputs))[1]
    )
    one.generate(prompts([4, 5]), greedy(3))
    one.score(prompts([6]))
    assert called and not [name for name in called if name.startswith("top")]
    one.generate(prompts([4, 5]), [greedy(3), greedy(2, logprobs=1)])
    assert [name for name in called if name.startswith("top")] == ["top[8]"] * 2


@pytest.mark.parametrize("value", [21, -1, 1.0, "1"])
def test_counts_out_of_range(one, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(logprobs=value)
    assert caught.value.key == "logprobs"
    with pytest.raises(RequestError) as caught:
        one.score([[1, 2]], top_logprobs=value)
    assert caught.value.key == "top_logprobs"


def test_more_than_the_engine_was_built_for(one, monkeypatch):
    few = dataclasses.replace(one.options, max_logprobs=3)
    monkeypatch.setattr(one._intake, "_options", few)
    assert len(one.generate([[1]], greedy(1, logprobs=3))[0].top_logprobs[0]) == 3
    for call in (
        lambda: one.generate([[1]], greedy(1, logprobs=4)),
        lambda: one.score([[1, 2]], top_logprobs=4),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert "max_logprobs" in caught.value.hint


def test_what_settings_say():
    assert SamplingParams().logprobs is None and SamplingParams(logprobs=False).logprobs is None
    assert SamplingParams(logprobs=True) == SamplingParams(logprobs=0)
    assert SamplingParams(logprobs=True) != SamplingParams(logprobs=1)
