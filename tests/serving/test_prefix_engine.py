"""What the engine finds in its cache, and that no bit changes by it."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from lora_moe_jax import ConfigError, Engine
from tests.adapters.tables import GOLDEN
from tests.serving.byte_tokenizer import byte_codec
from tests.serving.conftest import OPTIONS
from tests.serving.helpers import bits, greedy, load_golden, prompts, sampled, with_options

FAMILY = "deepseek_v3"
FOLDERS = GOLDEN / FAMILY / "adapters"
PAGE = 16


@pytest.fixture(params=["qwen3_moe", FAMILY])
def either(request, engine) -> Engine:
    """Grouped heads, and latents; with an empty cache."""
    one = engine(request.param)
    load_golden(one, request.param)
    return emptied(one)


@pytest.fixture
def one(engine) -> Engine:
    loaded = engine(FAMILY)
    load_golden(loaded, FAMILY)
    return emptied(loaded)


def emptied(engine: Engine) -> Engine:
    """With the prefix cache on, and nothing in it: all pages were taken and given back."""
    engine._runner.scheduler.prefix_cache = True
    pool = engine._runner.scheduler.pool
    pool.give_back(pool.take(pool.free))
    assert engine.stats().cached_pages == 0
    return engine


@contextlib.contextmanager
def few_pages(engine: Engine, count: int):
    """An empty cache with this many pages."""
    pool = emptied(engine)._runner.scheduler.pool
    held = pool.take(pool.free - count)
    try:
        yield
    finally:
        pool.give_back(held)


def hits(engine: Engine, batch, params, adapters=None) -> tuple[int, list]:
    """How many tokens were found, and the bits that came out."""
    before = engine.stats()
    outs = list(map(bits, engine.generate(batch, params, adapters)))
    after = engine.stats()
    found = after.prefix_hit_tokens - before.prefix_hit_tokens
    computed = after.prompt_tokens - before.prompt_tokens
    assert found + computed == sum(map(len, batch))
    return found, outs


@pytest.mark.parametrize("name", [None, "experts"])
def test_repeated_prompts(either, name):
    lengths = [1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 50, 3]
    batch = prompts(lengths)
    params = [sampled(i, 9) if i % 2 else greedy(9) for i in range(7)]
    found, cold = hits(either, batch, params, name)
    assert found == 0
    for chunk in (96, 7):
        either._runner.scheduler.prefill_chunk = chunk
        found, warm = hits(either, batch, params, name)
        assert found == sum((length - 1) // PAGE * PAGE for length in lengths)
        assert warm == cold


def test_many_samples_of_one_prompt(either):
    prompt = prompts([50], seed=3)[0]
    params = [sampled(seed, 6) for seed in range(8)]
    alone = [bits(emptied(either).generate([prompt], chosen)[0]) for chosen in params]
    for chunk in (96, 20):
        emptied(either)._runner.scheduler.prefill_chunk = chunk
        assert hits(either, [prompt] * 8, params) == (7 * 48, alone)


def test_a_conversation_goes_on(either):
    """What was generated is found like what was given."""
    prompt, more = prompts([20, 5], seed=4)
    out = either.generate([prompt], greedy(30), "attn")[0]
    longer = prompt + out.token_ids + more
    found, warm = hits(either, [longer], greedy(6), "attn")
    assert found == 48 == (20 + 30 - 1) // PAGE * PAGE
    assert hits(emptied(either), [longer], greedy(6), "attn") == (0, warm)


def test_each_adapter_finds_its_own(one):
    batch, names = prompts([40], seed=5) * 4, [None, "attn", "experts", "rslora"]
    found, cold = hits(one, batch, greedy(5), names)
    assert found == 0, "no adapter finds what another left"
    assert len(set(cold)) == 4
    assert hits(one, batch, greedy(5), names) == (4 * 32, cold)
    for name, expected in zip(names, cold, strict=True):
        assert hits(emptied(one), batch[:1], greedy(5), [name]) == (0, [expected])


def test_a_new_version_finds_nothing_of_the_old_one(one):
    batch = prompts([40], seed=6)
    one.load_adapter("changing", FOLDERS / "attn")
    first = hits(one, batch, greedy(5), "changing")[1]
    kept = one.stats().cached_pages
    one.load_adapter("changing", FOLDERS / "experts")
    assert one.stats().cached_pages == kept - 2, "they are gone at once"
    found, second = hits(one, batch, greedy(5), "changing")
    assert found == 0 and second == hits(one, batch, greedy(5), "experts")[1] != first
    one.load_adapter("changing", FOLDERS / "attn")
    assert hits(one, batch, greedy(5), "changing") == (0, first)
    one.unload_adapter("changing")
    one.load_adapter("changing", FOLDERS / "experts")
    assert hits(one, batch, greedy(5), "changing") == (0, second)


def test_an_old_version_keeps_its_pages_while_a_stream_is_open(one):
    batch = prompts([40], seed=7)
    expected = hits(one, batch, greedy(20), "attn")[1][0]
    before = one.stats().cached_pages
    stream = one.stream(batch, greedy(20), "attn")
    next(stream)
    one.unload_adapter("attn", when_busy="finish")
    one.load_adapter("attn", FOLDERS / "experts")
    assert one.stats().cached_pages == before
    found, new = hits(one, batch, greedy(20), "attn")
    assert found == 0 and new[0] != expected
    assert bits(list(stream)[-1].completion) == expected
    assert one.stats().cached_pages == 3, "only what the new version left"


def test_streams_closed_early(one):
    """What they had written serves; what they had not does not."""
    prompt = prompts([100], seed=8)[0]
    expected = hits(emptied(one), [prompt], greedy(8))[1]
    for chunk, steps in ((96, 1), (20, 1), (20, 3)):
        one._runner.scheduler.prefill_chunk = chunk
        closed = emptied(one).stream([prompt, [5]], greedy(8))
        for _ in range(steps):
            next(closed)
        closed.close()
        found, outs = hits(one, [prompt], greedy(8))
        assert outs == expected and 0 < found <= 96 and found % PAGE == 0


def test_scores_beside(either):
    """A score computes every token, whatever is there, and leaves pages for others."""
    batch, names = prompts([40, 33], seed=9), ["experts", None]
    cold = either.score(batch, names, return_logits=True)
    found, generated = hits(either, batch, greedy(6), names)
    assert found == 32 + 32
    before = either.stats()
    stream = either.stream(batch, greedy(6), names)
    next(stream)
    for score, expected in zip(either.score(batch, names, return_logits=True), cold, strict=True):
        assert np.array_equal(score.logits, expected.logits)
        assert np.array_equal(score.logprobs, expected.logprobs)
    ended = {delta.index: delta.completion for delta in stream if delta.completion}
    assert [bits(ended[index]) for index in range(2)] == generated
    after = either.stats()
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == 64
    assert after.prompt_tokens - before.prompt_tokens == 73 + (73 - 64)
    assert hits(emptied(either), batch, greedy(6), names) == (0, generated)


def test_eviction_under_pressure(one):
    """A tenth of the pages, and many prompts of a few beginnings."""
    rng = np.random.default_rng(10)
    heads, tails = prompts([34, 50, 18], seed=11), prompts([1, 7, 20], seed=12)
    kinds = [(h, t, n) for h in range(3) for t in range(3) for n in (None, "attn")]
    inputs = {kind: heads[kind[0]] + tails[kind[1]] for kind in kinds}
    expected = {}
    for kind in kinds:
        expected[kind] = bits(emptied(one).generate([inputs[kind]], greedy(7), [kind[2]])[0])
    total = 0
    with few_pages(one, 10):
        for _ in range(6):
            picks = [kinds[i] for i in rng.integers(len(kinds), size=12)]
            before = one.stats()
            outs = one.generate([inputs[k] for k in picks], greedy(7), [k[2] for k in picks])
            after = one.stats()
            assert list(map(bits, outs)) == [expected[kind] for kind in picks]
            assert after.cached_pages <= 10 == after.free_pages
            total += after.prefix_hit_tokens - before.prefix_hit_tokens
    assert total > 0


@pytest.mark.parametrize("pages", [10, 13])
def test_making_room_changes_nothing(either, pages):
    """Requests of up to five pages, over fewer than they need together."""
    batch = prompts([5, 17, 30, 1, 44, 20, 9, 33], seed=14)
    names = [None, "attn", "experts", None, "rslora", "attn", None, "experts"]
    params = [sampled(i, 60 - 5 * i) if i % 2 else greedy(60 - 5 * i) for i in range(8)]
    expected = hits(either, batch, params, names)[1]
    scored = either.score(batch, names)
    seen: dict[int, list] = {}
    with few_pages(either, pages):
        before = either.stats()
        for count, delta in enumerate(either.stream(batch, params, names)):
            seen.setdefault(delta.index, []).append(delta)
            if count == 60:
                scores = either.score(batch, names)
        after = either.stats()
        assert after.free_pages == pages
    assert after.preemptions - before.preemptions >= 2
    assert after.compilations == before.compilations
    for index, deltas in seen.items():
        assert bits(deltas[-1].completion) == expected[index]
        assert tuple(delta.token_id for delta in deltas) == expected[index][0], "each comes once"
    for score, wanted in zip(scores, scored, strict=True):
        assert np.array_equal(score.logprobs, wanted.logprobs)


def test_text_and_stops_go_on_after_making_room(one, monkeypatch):
    codec = byte_codec()
    monkeypatch.setattr(one._intake, "codec", codec)
    monkeypatch.setattr(one._runner, "_codec", codec)
    batch = prompts([5, 40, 30], seed=15)
    whole = one.generate(batch, greedy(60))
    params = [greedy(60, stop=[out.text[-3:]]) for out in whole]
    expected = one.generate(batch, params)
    parts = ["", "", ""]
    with few_pages(one, 8):
        before = one.stats().preemptions
        for delta in one.stream(batch, params):
            parts[delta.index] += delta.text
            assert delta.completion in (None, expected[delta.index])
        assert one.stats().preemptions > before
    assert parts == [out.text for out in expected]


def test_without_it_nothing_is_kept(one):
    batch, names = prompts([40, 40, 17], seed=13), ["attn", None, "experts"]
    expected = hits(one, batch * 2, greedy(5), names * 2)
    assert expected[0] == 32 + 32 + 16
    off = with_options(one, prefix_cache=False)
    load_golden(off, FAMILY)
    for _ in range(2):
        assert hits(off, batch * 2, greedy(5), names * 2) == (0, expected[1])
        assert off.stats().cached_pages == 0


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_option_is_a_boolean(value):
    with pytest.raises(ConfigError, match="out of range") as caught:
        Engine.from_pretrained(GOLDEN / FAMILY / "base", **OPTIONS, prefix_cache=value)
    assert caught.value.key == "prefix_cache"
