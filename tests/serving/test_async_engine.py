"""The engine for asyncio: many tasks on one thread, each with its own tokens."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lora_moe_jax import AdapterError, ConfigError, RequestError
from lora_moe_jax.serving.async_engine import AsyncEngine, EngineClosedError
from lora_moe_jax.serving.queue_limit import QueueFullError
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import ADAPTERS, bits, greedy, load_golden, prompts, sampled

FAMILY = "qwen3_moe"


@pytest.fixture
def one(engine):
    return engine(FAMILY)


@pytest.fixture
def slow(one, monkeypatch):
    step = one._runner.step

    def slow_step() -> None:
        time.sleep(0.01)
        step()

    monkeypatch.setattr(one._runner, "step", slow_step)
    return one


def run(engine, main, **options):
    """What `main(async_engine)` returns."""

    async def inside():
        async with AsyncEngine(engine, **options) as running:
            async with asyncio.timeout(60):
                return await main(running)

    return asyncio.run(inside())


async def collect(deltas) -> tuple[list[int], tuple]:
    """The tokens of one request, and the bits of its completion."""
    tokens = []
    async for delta in deltas:
        tokens.append(delta.token_id)
    return tokens, bits(delta.completion)


async def until_idle(running) -> None:
    while (stats := await running.stats()).running or stats.waiting:
        await asyncio.sleep(0.01)


def test_tasks_get_what_they_would_get_alone(one):
    """Twelve tasks on eight rows, in other adapters, with other lengths."""
    load_golden(one, FAMILY)
    texts = prompts([3, 17, 40, 5] * 3, seed=1)
    params = [greedy(5 + i) if i % 2 else sampled(i, 5 + i) for i in range(12)]
    names = [(None, *ADAPTERS)[i % 4] for i in range(12)]
    each = list(zip(texts, params, names, strict=True))
    expected = [bits(one.generate([t], [p], [n])[0]) for t, p, n in each]

    async def main(running):
        return await asyncio.gather(
            *(collect(running.generate(*request)) for request in each),
            running.score(texts[:2], ["attn", None]),
        )

    before = one.stats().steps
    *got, scores = run(one, main)
    assert [completion for _, completion in got] == expected
    assert [tuple(tokens) for tokens, _ in got] == [tokens for tokens, _ in expected]
    for score, alone in zip(scores, one.score(texts[:2], ["attn", None]), strict=True):
        assert np.array_equal(score.logprobs, alone.logprobs)
    assert one.stats().steps - before < sum(5 + i for i in range(12)) // 2  # they shared steps


def test_tokens_come_as_they_are_made(slow):
    """A short request that starts later is done while a long one goes on."""

    async def main(running):
        order = []

        async def read(name, length):
            async for _ in running.generate([5, 6, 7], greedy(length)):
                order.append(name)

        first = asyncio.create_task(read("long", 100))
        while "long" not in order:
            await asyncio.sleep(0.005)
        await read("short", 5)
        done = len(order)
        await first
        return order, done

    order, done = run(slow, main)
    assert (order.count("long"), order.count("short")) == (100, 5)
    assert done < 90
    between = order[order.index("short") : len(order) - order[::-1].index("short")]
    assert between.count("long") >= 3


def test_a_call_with_several_requests(one):
    load_golden(one, FAMILY, ["attn"])
    texts, params = prompts([4, 9, 2]), [greedy(3), greedy(6), greedy(2)]
    names = [None, "attn", None]
    expected = [bits(c) for c in one.generate(texts, params, names)]

    async def main(running):
        with await running.stream(texts, params, names) as deltas:
            ends = {d.index: bits(d.completion) async for d in deltas if d.completion}
        with await running.stream([]) as none:
            assert [delta async for delta in none] == []
        return [ends[i] for i in range(3)]

    assert run(one, main) == expected


def test_closing_the_iterator_ends_the_request(slow):
    async def main(running):
        deltas = running.generate([5, 6, 7], greedy(100))
        async for _ in deltas:
            break
        await deltas.aclose()
        await until_idle(running)
        return await running.stats()

    before = slow.stats().generated_tokens
    assert run(slow, main).generated_tokens - before < 100


def test_dropping_the_deltas_ends_the_requests(slow):
    async def main(running):
        deltas = await running.stream([[5, 6, 7]] * 2, greedy(60))
        await anext(deltas)
        del deltas
        gc.collect()
        await until_idle(running)
        return (await running.stats()).generated_tokens

    before = slow.stats().generated_tokens
    assert run(slow, main) - before < 60


def test_a_loop_that_is_closed_ends_its_requests(slow):
    """Nobody can take what comes any more."""
    loop, before = asyncio.new_event_loop(), slow.stats().generated_tokens

    async def begin():
        deltas = await running.stream([[5, 6, 7]] * 2, greedy(60))
        await anext(deltas)
        return deltas

    running = AsyncEngine(slow)
    try:
        kept = loop.run_until_complete(begin())
        loop.close()
        asyncio.run(asyncio.wait_for(until_idle(running), 60))
        assert kept.requests and slow.stats().generated_tokens - before < 60
    finally:
        running.close()


def test_cancelling_the_task_ends_the_request(slow):
    async def main(running):
        read = [collect(running.generate([5, 6, 7], greedy(100))) for _ in range(12)]
        tasks = [asyncio.create_task(task) for task in read]
        while (stats := await running.stats()).running < 8:
            await asyncio.sleep(0.01)
        assert stats.waiting == 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        await until_idle(running)

    before = slow.stats().generated_tokens
    run(slow, main)
    assert slow.stats().generated_tokens - before < 8 * 100


def test_cancelling_before_the_request_was_taken(slow):
    async def main(running):
        tasks = [asyncio.create_task(running.stream([[5, 6]], greedy(100))) for _ in range(3)]
        await asyncio.sleep(0)  # the commands are on their way
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(running)

    run(slow, main)


def test_a_failing_step_reaches_every_caller_and_the_engine_goes_on(one, monkeypatch):
    (expected,) = one.generate([[5, 6, 7]], greedy(6))
    begin, calls = one._runner.steps.run, []

    def fail_once(*batch):
        calls.append(batch)
        if len(calls) == 4:
            raise FloatingPointError("the fourth step")
        return begin(*batch)

    async def main(running):
        monkeypatch.setattr(one._runner.steps, "run", fail_once)
        errors = await asyncio.gather(
            *(collect(running.generate([5, 6, n], greedy(20))) for n in range(10)),
            return_exceptions=True,
        )
        assert [type(error) for error in errors] == [FloatingPointError] * 10
        stats = await running.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_pages == stats.total_pages
        return await collect(running.generate([5, 6, 7], greedy(6)))

    assert run(one, main)[1] == bits(expected)


def test_a_failing_score_reaches_everyone_in_its_steps(slow, monkeypatch):
    def fail(*arguments, **options):
        raise FloatingPointError("scoring")

    async def main(running):
        deltas = running.generate([5, 6, 7], greedy(100))
        await anext(deltas)
        monkeypatch.setattr(slow._runner.steps, "score", fail)
        with pytest.raises(FloatingPointError):
            await running.score([[5, 6, 7]])
        with pytest.raises(FloatingPointError):
            await collect(deltas)
        with pytest.raises(RequestError):
            await running.score([[]])
        monkeypatch.undo()
        assert len((await running.score([[5, 6, 7]]))[0].logprobs) == 2

    run(slow, main)


def test_bad_requests_are_refused_and_disturb_nobody(slow):
    async def main(running):
        deltas = running.generate([5, 6, 7], greedy(30))
        await anext(deltas)
        bad = ([[10**6]], [[]], ["text"], [[1] * 200], "text", [[1], None], 5)
        for prompt in bad:
            with pytest.raises(RequestError):
                await running.stream(prompt, greedy(3))
        with pytest.raises(RequestError, match="nobody"):
            await anext(running.generate([1], adapter="nobody"))
        return await collect(deltas)

    (expected,) = slow.generate([[5, 6, 7]], greedy(30))
    assert run(slow, main)[1] == bits(expected)


def test_the_queue_has_a_limit(slow):
    async def main(running):
        with await running.stream([[5, 6]] * 9, greedy(50)) as deltas:  # eight run, one waits
            await anext(deltas)
            with pytest.raises(QueueFullError):
                await running.stream([[5, 6]] * 2, greedy(2))
            with await running.stream([[5, 6]], greedy(2)) as other:
                await anext(deltas)
                with pytest.raises(QueueFullError):
                    await running.stream([[5, 6]], greedy(2))
                other.close()
        with pytest.raises(RequestError) as error:
            await running.stream([[5, 6]] * 11, greedy(2))
        assert not isinstance(error.value, QueueFullError)
        assert len([d async for d in await running.stream([[5, 6]] * 10, greedy(2))]) == 20

    run(slow, main, max_waiting=2)
    with pytest.raises(ConfigError):
        AsyncEngine(slow, max_waiting=-1)


def test_adapters_come_and_go_beside_a_request(slow):
    folder = GOLDEN / FAMILY / "adapters"

    async def main(running):
        info = await running.load_adapter("a", folder / "attn")
        deltas = running.generate([5, 6, 7], greedy(40), "a")
        await anext(deltas)
        await running.load_adapter("b", str(folder / "experts"))
        assert [i.name for i in await running.adapters()] == [info.name, "b"]
        with pytest.raises(AdapterError, match="in use"):
            await running.unload_adapter("a")
        assert (await running.load_adapter("a", folder / "attn")).version == info.version + 1
        with pytest.raises(AdapterError):
            await running.load_adapter("c", folder / "nothing")
        with pytest.raises(AdapterError):
            await running.load_adapter("c", 5)
        assert (await running.pin_adapter("b")).pinned
        assert not (await running.unpin_adapter("b")).pinned
        await running.unload_adapter("a", when_busy="finish")
        assert [i.name for i in await running.adapters()] == ["b"]
        *_, last = [delta async for delta in deltas]
        assert last.completion.adapter_version == info.version  # the one that it began with
        return [i.name for i in await running.adapters()]

    assert run(slow, main) == ["b"]


def test_threads_share_the_engine(slow):
    """Beside tasks, too: everybody gets what he would get alone."""
    cases = [([5, 6, 7], 20), ([8], 7), ([9, 5, 6], 30), ([6] * 9, 1)]
    expected = [slow.generate([prompt], greedy(count))[0] for prompt, count in cases]

    def work(number):
        prompt, count = cases[number % len(cases)]
        if number % 3:
            return slow.generate([prompt], greedy(count))[0]
        *_, last = slow.stream([prompt], greedy(count))
        return last.completion

    async def main(running):
        with ThreadPoolExecutor(6) as threads:
            loop = asyncio.get_running_loop()
            others = [loop.run_in_executor(threads, work, number) for number in range(24)]
            for prompt, count in cases * 2:
                *_, last = [delta async for delta in running.generate(prompt, greedy(count))]
                yield prompt, last.completion
            for number, its in enumerate(await asyncio.gather(*others)):
                yield cases[number % len(cases)][0], its

    async def collected(running):
        return [its async for its in main(running)]

    of_prompt = {tuple(prompt): bits(its) for (prompt, _), its in zip(cases, expected, strict=True)}
    for prompt, its in run(slow, collected):
        assert bits(its) == of_prompt[tuple(prompt)]
    assert not slow.stats().running and not slow.stats().waiting


def test_closing_ends_open_requests_and_refuses_new_ones(slow):
    async def main():
        running = AsyncEngine(slow)
        deltas = running.generate([5, 6, 7], greedy(100))
        await anext(deltas)
        assert running.alive
        running.close()
        running.close()
        assert not running.alive
        with pytest.raises(EngineClosedError):
            while True:
                await anext(deltas)
        for call in (running.stats(), running.stream([[1]]), running.unload_adapter("a")):
            with pytest.raises(EngineClosedError):
                await call

    asyncio.run(main())


def test_two_event_loops_one_after_the_other(one):
    """And a request whose loop ends without closing it does not stop the thread."""
    with_open = AsyncEngine(one)

    async def leave_open():
        return await (await with_open.stream([[5, 6]], greedy(20))).__anext__()

    async def read():
        return await collect(with_open.generate([5, 6], greedy(4)))

    asyncio.run(leave_open())
    tokens, _ = asyncio.run(read())
    with_open.close()
    assert len(tokens) == 4
