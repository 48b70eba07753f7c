"""Where generations end, streams, and more requests than fit at once."""

from __future__ import annotations

import dataclasses
import gc
import threading

import numpy as np
import pytest

from lora_moe_jax import AdapterError, FinishReason, QueueFullError, SamplingParams
from lora_moe_jax.serving.scheduler import Scheduler
from tests.serving.byte_tokenizer import byte_codec
from tests.serving.helpers import bits, greedy, load_golden, prompts, sampled

FAMILY = "deepseek_v3"


@pytest.fixture
def one(engine):
    return engine(FAMILY)


@pytest.fixture
def with_text(one, monkeypatch):
    codec = byte_codec()
    monkeypatch.setattr(one._intake, "codec", codec)
    monkeypatch.setattr(one._runner, "_codec", codec)
    return one


def run(one, prompt, params):
    return one.generate([prompt], params)[0]


# ---- where it ends -------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 60])
def test_max_tokens(one, tokens):
    out = run(one, prompts([7])[0], greedy(tokens))
    assert len(out.token_ids) == len(out.logprobs) == tokens
    assert out.finish_reason is FinishReason.LENGTH and out.finish_reason == "length"


def test_prompt_and_output_may_fill_the_cache(one):
    length = one.options.max_length
    for prompt_length in (1, 95, 96, 97, length - 1):
        out = run(one, prompts([prompt_length])[0], greedy(length - prompt_length))
        assert len(out.token_ids) == length - prompt_length


def test_stop_token_ids(one):
    prompt = prompts([5], seed=1)[0]
    whole = run(one, prompt, greedy(20)).token_ids
    for place in (0, 3, 9):
        first = whole.index(whole[place])
        out = run(one, prompt, greedy(20, stop_token_ids=[whole[place], 255]))
        assert out.token_ids == whole[: first + 1], "the stop token is kept"
        assert out.finish_reason is FinishReason.STOP
    unseen = next(token for token in range(256) if token not in whole)
    assert run(one, prompt, greedy(20, stop_token_ids=[unseen])).token_ids == whole


def test_end_of_text_tokens(one, monkeypatch):
    prompt = prompts([5], seed=1)[0]
    whole = run(one, prompt, greedy(20)).token_ids
    ends = (whole[4], 255)
    config = dataclasses.replace(one._intake._config, eos_token_ids=ends)
    monkeypatch.setattr(one._intake, "_config", config)
    out = run(one, prompt, greedy(20, ignore_eos=False))
    assert out.token_ids == whole[: whole.index(whole[4]) + 1]
    assert out.finish_reason is FinishReason.STOP
    assert run(one, prompt, greedy(20)).token_ids == whole, "ignore_eos goes on"
    both = greedy(20, stop_token_ids=ends)
    assert run(one, prompt, both).token_ids == out.token_ids, "ignore_eos is not about these"


def test_a_stop_token_that_is_the_last_one_counts_as_stop(one):
    prompt = prompts([5], seed=1)[0]
    whole = run(one, prompt, greedy(3)).token_ids
    out = run(one, prompt, greedy(3, stop_token_ids=[whole[2]]))
    assert out.finish_reason is FinishReason.STOP


def test_logprobs_only_when_asked_for(one):
    out = run(one, [3, 4], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert out.logprobs is None and out.text is None
    assert all(delta.logprob is None for delta in one.stream([[3, 4]], SamplingParams(seed=1)))


def test_one_setting_and_one_adapter_for_all(one):
    load_golden(one, FAMILY, ["attn"])
    version = one.adapters()[0].version
    batch = prompts([3, 4])
    outs = one.generate(batch, greedy(4), "attn")
    assert [out.adapter for out in outs] == ["attn", "attn"]
    assert [out.adapter_version for out in outs] == [version, version]
    assert list(map(bits, outs)) == list(
        map(bits, one.generate(batch, [greedy(4)] * 2, ["attn"] * 2))
    )
    assert one.generate([]) == [] and one.score([]) == []
    assert [out.prompt_token_ids for out in outs] == batch


def test_prompts_may_be_arrays(one):
    batch = prompts([5, 5])
    expected = list(map(bits, one.generate(batch, greedy(4))))
    for same in (np.array(batch), [np.array(batch[0], np.uint8), tuple(batch[1])]):
        assert list(map(bits, one.generate(same, greedy(4)))) == expected
    assert one.score(np.array(batch))[0].logprobs.shape == (4,)


def test_a_score_of_one_token_is_empty(one):
    score = one.score([[5]], return_logits=True)[0]
    assert score.logprobs.shape == (0,) and score.logprobs.dtype == np.float32
    assert score.logits.shape == (1, 256)


# ---- streams -------------------------------------------------------------------------------------
def test_deltas_make_up_the_completion(with_text):
    batch, params = prompts([5, 9, 2]), [greedy(20), sampled(1, 11), greedy(7)]
    expected = with_text.generate(batch, params)
    seen: dict[int, list] = {0: [], 1: [], 2: []}
    for delta in with_text.stream(batch, params):
        assert not seen[delta.index] or seen[delta.index][-1].completion is None
        seen[delta.index].append(delta)
    for index, deltas in seen.items():
        out = deltas[-1].completion
        assert [delta.token_id for delta in deltas] == out.token_ids
        assert [delta.logprob for delta in deltas] == out.logprobs
        assert "".join(delta.text for delta in deltas) == out.text
        assert out == expected[index]
        assert out.text == with_text.codec.decode(out.token_ids)


def test_stop_strings(with_text):
    prompt = prompts([5], seed=1)[0]
    whole = run(with_text, prompt, greedy(40))
    stop = whole.text[6:9]
    assert "\ufffd" not in stop
    first = whole.text.index(stop)
    out = run(with_text, prompt, greedy(40, stop=[stop, "never there"]))
    assert out.text == whole.text[:first]
    assert out.finish_reason is FinishReason.STOP
    assert out.token_ids == whole.token_ids[: len(out.token_ids)]
    assert stop in with_text.codec.decode(out.token_ids), "tokens are not cut"
    assert stop not in with_text.codec.decode(out.token_ids[:-1])
    parts = list(with_text.stream([prompt], greedy(40, stop=stop)))
    assert "".join(delta.text for delta in parts) == out.text


def test_text_prompts(with_text):
    ids = with_text.codec.encode("héllo")
    by_text, by_ids = (run(with_text, prompt, greedy(6)) for prompt in ("héllo", ids))
    assert by_text == by_ids and by_text.prompt_token_ids == ids
    assert np.array_equal(
        with_text.score(["héllo"])[0].logprobs, with_text.score([ids])[0].logprobs
    )


def test_interleaved_streams_and_a_generate_between(one):
    load_golden(one, FAMILY)
    batch = prompts([5, 12, 20])
    names = ["attn", None, "experts"]
    alone = [bits(one.generate([p], greedy(12), [n])[0]) for p, n in zip(batch, names, strict=True)]
    streams = [
        one.stream([prompt], greedy(12), [name])
        for prompt, name in zip(batch[:2], names[:2], strict=True)
    ]
    seen = [[], []]
    for turn in range(5):
        for stream, deltas in zip(streams, seen, strict=True):
            deltas.append(next(stream))
        if turn == 2:
            between = one.generate(batch[2:], greedy(12), names[2:])[0]
    for stream, deltas in zip(streams, seen, strict=True):
        deltas.extend(stream)
    assert bits(between) == alone[2]
    for deltas, expected in zip(seen, alone, strict=False):
        assert bits(deltas[-1].completion) == expected
        assert tuple(delta.token_id for delta in deltas) == expected[0]


def is_idle(one) -> bool:
    stats = one.stats()
    return stats.free_pages == stats.total_pages and stats.running == stats.waiting == 0


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_closing_a_stream_frees_everything(one, steps):
    load_golden(one, FAMILY, ["attn"])
    stream = one.stream(prompts([20] * 12), greedy(30), "attn")
    for _ in range(steps):
        next(stream)
    assert one.stats().waiting + one.stats().running == 12
    with pytest.raises(AdapterError, match="in use"):
        one.unload_adapter("attn")
    stream.close()
    assert is_idle(one)
    one.unload_adapter("attn")
    assert len(run(one, [5, 6], greedy(3)).token_ids) == 3


def test_a_stream_that_is_dropped_frees_everything(one):
    stream = one.stream(prompts([20] * 3), greedy(30))
    next(stream)
    del stream
    gc.collect()
    assert is_idle(one)


def test_a_stream_that_is_dropped_in_a_step_ends_after_it(one, monkeypatch):
    """As when the collector finds it there: the step's own books are not changed under it."""
    dropped, goes_on = (one.stream([[5, 6, 7]], greedy(8)) for _ in range(2))
    runner, seen = one._runner, []
    next_batch = runner.scheduler.next_batch

    def dropping():
        nonlocal dropped
        dropped = None
        seen.append(len(runner.scheduler.waiting))
        return next_batch()

    monkeypatch.setattr(runner.scheduler, "next_batch", dropping)
    assert len(list(goes_on)) == 8
    assert seen[:2] == [2, 0], "both waited still in the step, and one ran in the next"
    stats = one.stats()
    assert (stats.running, stats.waiting) == (0, 0)


def test_threads_together_find_no_more_room_than_there_is(one, monkeypatch):
    options = dataclasses.replace(one.options, max_waiting=1)
    monkeypatch.setattr(one, "options", options)
    room, streams, refused = options.max_requests + 1, [], []
    barrier = threading.Barrier(room + 3)

    def open_stream():
        barrier.wait()
        try:
            streams.append(one.stream([[5, 6, 7]], greedy(2)))
        except QueueFullError as error:
            refused.append(error)

    threads = [threading.Thread(target=open_stream) for _ in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stream in streams:
        stream.close()
    assert (len(streams), len(refused)) == (room, 3)


def test_closing_one_stream_leaves_the_other(one):
    batch = prompts([10, 12])
    expected = bits(run(one, batch[1], greedy(15)))
    first, second = (one.stream([prompt], greedy(15)) for prompt in batch)
    deltas = [next(second)]
    next(first)
    first.close()
    deltas.extend(second)
    assert bits(deltas[-1].completion) == expected


# ---- more than fits ------------------------------------------------------------------------------
def test_more_requests_than_rows(one):
    batch = prompts([1 + 5 * (i % 7) for i in range(30)])
    params = [greedy(1 + i % 9) for i in range(30)]
    outs = one.generate(batch, params)
    assert [len(out.token_ids) for out in outs] == [p.max_tokens for p in params]
    for i in (0, 13, 29):
        assert bits(outs[i]) == bits(run(one, batch[i], params[i]))
    scores = one.score(batch)
    assert [len(score.logprobs) for score in scores] == [len(prompt) - 1 for prompt in batch]


def test_more_pages_than_there_are(one, monkeypatch):
    """With a third of the pages fewer requests run at a time; none is lost or changed."""
    batch, params = prompts([60] * 9), greedy(20)
    expected = list(map(bits, one.generate(batch, params)))
    pool = one._runner.scheduler.pool
    held = pool.take(pool.free - 2 * pool.needed(79))
    most = 0
    step = Scheduler.next_batch

    def watched(self):
        nonlocal most
        batch = step(self)
        most = max(most, len(self.running))
        return batch

    monkeypatch.setattr(Scheduler, "next_batch", watched)
    assert list(map(bits, one.generate(batch, params))) == expected
    assert most == 2
    pool.give_back(held)


def test_counters(one):
    before = one.stats()
    one.generate(prompts([5, 7]), greedy(4))
    one.score(prompts([10]))
    after = one.stats()
    assert after.prompt_tokens - before.prompt_tokens == 22
    assert after.generated_tokens - before.generated_tokens == 8
    assert after.steps - before.steps == 5
    assert after.bank_bytes == one.bank.nbytes > 0 and after.cache_bytes > 0
    assert after.compilations == before.compilations
