"""Ending requests early, waiting or running, and engines that are full or asleep."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import time

import numpy as np
import pytest

from lora_moe_jax import AsyncEngine, ConfigError, Engine, FinishReason, RequestError
from lora_moe_jax.serving.options import EngineOptions
from lora_moe_jax.serving.queue_limit import QueueFullError
from tests.serving.byte_tokenizer import byte_codec
from tests.serving.helpers import TIGHT, bits, greedy, load_golden, prompts

FAMILY = "qwen3_moe"


@pytest.fixture
def one(engine) -> Engine:
    return engine(FAMILY)


@pytest.fixture
def slow(one, monkeypatch) -> Engine:
    step = one._runner.step

    def slow_step() -> None:
        time.sleep(0.01)
        step()

    monkeypatch.setattr(one._runner, "step", slow_step)
    return one


def ends(stream) -> dict:
    return {d.index: d.completion for d in stream if d.completion}


# ---- abort ---------------------------------------------------------------------------------------
def test_aborting_one_that_runs_and_one_that_waits(one):
    load_golden(one, FAMILY, ["attn"])
    batch = prompts([6] * 10)
    expected = list(map(bits, one.generate(batch, greedy(12), "attn")))
    stream = one.stream(batch, greedy(12), "attn")
    seen = [next(stream) for _ in range(20)]
    scheduler = one._runner.scheduler
    running, waiting = scheduler.running[2].index, scheduler.waiting[-1].index
    for index in (running, waiting, running):  # a second time changes nothing
        stream.abort(index)
    assert len(scheduler.running) == 7 and len(scheduler.waiting) == 1
    rest = list(stream)
    deltas = [d for d in seen + rest if d.index == running]
    last = deltas[-1]
    assert last.token_id is None and last.logprob is None
    ended = {d.index: d.completion for d in rest if d.completion}
    assert ended[running].finish_reason is FinishReason.ABORT == "abort"
    assert ended[running].token_ids == [d.token_id for d in deltas[:-1]]
    tokens = tuple(ended[running].token_ids)
    assert tokens and tokens == expected[running][0][: len(tokens)]
    assert ended[waiting].token_ids == [] and ended[waiting].logprobs == []
    for index in set(range(10)) - {running, waiting}:
        assert bits(ended[index]) == expected[index]
    stream.abort()
    stream.close()
    stream.abort(0)
    one.unload_adapter("attn")


@pytest.mark.parametrize("steps", [0, 3, 20])
def test_aborting_all_delivers_every_result(one, steps):
    stream = one.stream(prompts([6] * 10), greedy(12))
    seen = [next(stream) for _ in range(steps)]
    stream.abort()
    assert one.stats().running == one.stats().waiting == 0
    assert one.stats().free_pages == one.stats().total_pages
    seen += stream
    completions = {d.index: d.completion for d in seen if d.completion}
    assert sorted(completions) == list(range(10))
    for index, completion in completions.items():
        tokens = [d.token_id for d in seen if d.index == index and d.token_id is not None]
        assert completion.token_ids == tokens
    assert sum(c.finish_reason == "abort" for c in completions.values()) >= 8


def test_aborting_from_inside_the_loop(one):
    """Each one when another's token comes, before and after it in the order of prompts."""
    stream = one.stream(prompts([6] * 4), greedy(50))
    aborted = {}
    for delta in stream:
        if delta.completion:
            aborted[delta.index] = delta.completion.finish_reason
        elif delta.index == 2 and not aborted:
            stream.abort(0)
            stream.abort(3)
        elif set(aborted) >= {0, 3}:
            stream.abort()
    assert aborted == dict.fromkeys(range(4), "abort")


def test_an_aborted_text_ends_with_what_was_held_back(one, monkeypatch):
    codec = byte_codec()
    monkeypatch.setattr(one._intake, "codec", codec)
    monkeypatch.setattr(one._runner, "_codec", codec)
    with one.stream(["abc"], greedy(30)) as stream:
        deltas = [next(stream) for _ in range(7)]
        stream.abort(0)
        deltas += stream
    (completion,) = [d.completion for d in deltas if d.completion]
    assert "".join(d.text for d in deltas) == completion.text
    assert completion.text == codec.decode(completion.token_ids)


@pytest.mark.parametrize("index", [2, -1, "0", 1.5])
def test_there_is_no_such_request(one, index):
    with one.stream([[1], [2]], greedy(3)) as stream:
        with pytest.raises(RequestError, match="index"):
            stream.abort(index)


def test_aborting_from_asyncio(slow):
    async def main():
        async with AsyncEngine(slow) as running:
            with await running.stream([[5, 6, n] for n in range(10)], greedy(60)) as deltas:
                seen = [await anext(deltas) for _ in range(8)]
                deltas.abort(9)  # it waits
                deltas.abort(0)
                with pytest.raises(RequestError, match="index"):
                    deltas.abort(10)
                ended = []
                async for delta in deltas:
                    seen.append(delta)
                    if delta.completion:
                        ended.append((delta.index, str(delta.completion.finish_reason)))
                        if len(ended) == 2:
                            deltas.abort()
            deltas.abort()  # all are done
            stats = await running.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert stats.free_pages == stats.total_pages
            return ended

    ended = asyncio.run(main())
    assert {index for index, _ in ended[:2]} == {0, 9}
    assert sorted(ended) == [(n, "abort") for n in range(10)]


def test_a_score_is_cancelled_waiting_and_running(slow):
    """And generations hand their tokens over while it runs."""

    async def main():
        async with AsyncEngine(slow) as running:
            deltas = running.generate([5, 6, 7], greedy(100))
            await anext(deltas)
            tasks = [asyncio.create_task(running.score(prompts([100] * 12))) for _ in range(2)]
            while not (await running.stats()).waiting:
                await anext(deltas)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(task.cancelled() for task in tasks)
            while (stats := await running.stats()).running > 1 or stats.waiting:
                await anext(deltas)
            await deltas.aclose()

    asyncio.run(main())


# ---- limits --------------------------------------------------------------------------------------
def test_a_full_engine_refuses(one, monkeypatch):
    limited = dataclasses.replace(one.options, max_waiting=2)
    monkeypatch.setattr(one, "options", limited)
    first = one.stream(prompts([4] * 8), greedy(9))
    next(first)
    second = one.stream(prompts([4]), greedy(9))
    for call in (one.generate, one.score, one.stream):
        with pytest.raises(QueueFullError, match="too many requests are waiting") as caught:
            call([[1], [2]])
        assert "at most 10" in str(caught.value)
    assert one.stats().running == 8 and one.stats().waiting == 1
    assert len(one.score([[1, 2]])) == 1
    second.close()
    first.close()
    with pytest.raises(RequestError, match="in one call") as caught:
        one.generate([[1]] * 11)
    assert not isinstance(caught.value, QueueFullError)
    assert len(one.generate([[1]] * 10, greedy(1))) == 10


def test_scores_wait_in_the_same_queue(slow):
    async def main():
        async with AsyncEngine(slow, max_waiting=0) as running:
            with await running.stream([[5, 6]] * 8, greedy(50)) as deltas:
                await anext(deltas)
                with pytest.raises(QueueFullError):
                    await running.score([[5, 6]])
            while (await running.stats()).running:
                await asyncio.sleep(0.01)
            return await running.score([[5, 6]])

    (score,) = asyncio.run(main())
    assert np.array_equal(score.logprobs, slow.score([[5, 6]])[0].logprobs)


SIZES = {
    "dtype": "float32",
    "max_adapters": 1,
    "max_rank": 1,
    "max_requests": 1,
    "max_length": 8,
    "page_size": 4,
    "token_buckets": None,
    "prefill_chunk": None,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_waiting", -1), ("max_waiting", True), ("max_waiting", 1.0)]
    + [("max_logprobs", -1), ("max_logprobs", 21), ("max_logprobs", None)]
    + [("adapter_disk", "there is no such folder"), ("adapter_disk", 0)],
)
def test_limits_out_of_range(one, key, value):
    with pytest.raises(ConfigError) as caught:
        EngineOptions.resolve(one.config, **SIZES | {key: value})
    assert caught.value.key == key


LEFT_OPEN = f"""
from lora_moe_jax import Engine
from lora_moe_jax.pocket import BASE
stream = Engine.from_pretrained(BASE, **{TIGHT}).stream(["The import"])
print(next(stream).index)
"""


def test_a_stream_that_is_left_open_says_nothing_at_exit():
    """Its requests end while there is still everything that ends them."""
    run = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr
    assert "Exception" not in run.stderr
