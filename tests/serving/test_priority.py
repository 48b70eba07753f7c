"""Priorities: the order of admission, who makes room, who may starve and who may not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_jax import AsyncEngine, Engine, RequestError
from lora_moe_jax.serving.scheduler import MAX_PASSES, Scheduler
from tests.serving import test_pool as pools
from tests.serving.helpers import bits, greedy, prompts
from tests.serving.test_scheduler import check, generating, scheduler, scoring, take_results

FAMILY = "qwen3_moe"


class Watched(Scheduler):
    """Checks who makes room: of the lowest priority, the one that was admitted last."""

    def _preempt(self, request):
        lowest = max(other.priority for other in self.running)
        assert request is [other for other in self.running if other.priority == lowest][-1]
        super()._preempt(request)
        first = [other for other in self.waiting if other.priority == lowest][0]
        assert request is first, "it goes back to the front of its priority"


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["score", "generate"]),
        st.integers(1, 20),
        st.integers(1, 12),
        st.integers(-2, 2),
    ),
    max_size=14,
)


@settings(max_examples=200, deadline=None)
@given(
    REQUESTS,
    st.integers(1, 4),
    st.integers(8, 20),
    st.integers(1, 16),
    st.lists(st.integers(0, 3), max_size=10),
)
def test_the_order_of_admission(kinds, rows, pages, chunk, arrivals):
    """By priority, then by arrival; every request finishes; the first of the highest gets on."""
    one = scheduler(rows, pages, chunk=chunk)
    one.__class__ = Watched
    todo = []
    for i, (kind, length, tokens, priority) in enumerate(kinds):
        made = scoring(length, i) if kind == "score" else generating(length, tokens, i)
        made.priority = priority
        todo.append(made)
    coming, admitted = list(todo), []
    for step in range(1500):
        arriving = arrivals[step] if step < len(arrivals) else len(coming)
        one.add(coming[:arriving])
        coming = coming[arriving:]
        assert [r.priority for r in one.waiting] == sorted(r.priority for r in one.waiting)
        first = min(one.running, key=lambda r: r.priority, default=None)
        before = list(one.running)
        batch = one.next_batch()
        assert first is None or first in one.running, "the first of the highest made room"
        new = [r for r in one.running if r not in before]
        highest_left = min((r.priority for r in one.waiting), default=9)
        assert all(r.priority <= highest_left for r in new), "one of a lower priority passed"
        admitted += [r for r in one.running if r not in admitted]
        if batch is None:
            if not coming:
                break
            continue
        check(one, batch)
        take_results(one, batch)
    assert all(r.done for r in todo)
    for priority in range(-2, 3):
        indices = [r.index for r in admitted if r.priority == priority]
        assert indices == sorted(indices), "out of order within a priority"
    assert one.pool.free == pages and not one.running and not one.waiting


def test_of_the_lowest_priority_the_last_admitted_makes_room():
    one = scheduler(rows=4, pages=8, buckets=(4, 32), chunk=32)
    low = [generating(8, 12, i) for i in range(2)]
    for request in low:
        request.priority = 5
    one.add(low)
    take_results(one, one.next_batch())
    high = generating(8, 12, 2)
    one.add([high])
    for _ in range(12):
        if one.counts["preemptions"]:
            break
        take_results(one, one.next_batch())
    assert one.waiting == [low[1]] and one.running == [low[0], high]


def some(one: Scheduler, name: str, priority: int, **sizes):
    made = pools.request(one, name, **sizes)
    one.waiting.remove(made)
    one.adapters.end(made.adapter) if made.adapter else None
    made.priority = priority
    one.add([made])
    return made


@pytest.mark.parametrize("rival", ["same", "lower"])
def test_who_waits_for_a_slot_does_not_starve(rival):
    """Beside a constant load of its own priority, or of a lower one, whose adapters have slots."""
    one = pools.scheduler(2, "abc", rows=4)
    load = 0 if rival == "same" else 3
    for name in "abab":
        some(one, name, load, max_tokens=3)
    pools.step(one)
    waits = some(one, "c", 0)
    for _ in range(60):
        if waits.done:
            break
        for name in "ab":
            some(one, name, load, max_tokens=3)
        pools.step(one)
    assert waits.done and waits.passed <= MAX_PASSES


def test_lower_priorities_starve_only_while_higher_ones_come():
    one = pools.scheduler(2, "ab", rows=2)
    for _ in range(2):
        some(one, "a", 0, max_tokens=3)
    waits = some(one, "b", 1)
    for _ in range(40):
        some(one, "a", 0, max_tokens=3)
        pools.step(one)
    assert waits.row < 0 and not waits.generated, "rows go to those of the higher priority"
    while one.unfinished:
        pools.step(one)
    assert waits.done


# ---- the engine ----------------------------------------------------------------------------------
def full(engine: Engine):
    """A stream that has every row, and gives them up one at a time."""
    crowd = engine.stream(prompts([3] * 8, seed=1), [greedy(20 + 3 * n) for n in range(8)])
    next(crowd)
    return crowd


def test_smaller_priorities_are_admitted_earlier(engine):
    one, batch = engine(FAMILY), prompts([5] * 12)
    expected = list(map(bits, one.generate(batch, greedy(12))))
    crowd = full(one)
    priorities = [3, 1, 2, 0, 3, 1, 2, 0, 3, 1, 2, 0]
    began, found = {}, {}
    for delta in one.stream(batch, greedy(12), priority=priorities):
        began.setdefault(delta.index, one.stats().steps)
        if delta.completion:
            found[delta.index] = bits(delta.completion)
    steps = [began[i] for i in sorted(range(12), key=lambda i: priorities[i])]
    assert steps == sorted(steps), "by priority, and then as they came"
    assert len(set(steps)) > 5
    assert [found[i] for i in range(12)] == expected, "no bit depends on it"
    crowd.close()


def test_scores_and_calls_have_priorities_too(engine):
    one = engine(FAMILY)
    crowd = full(one)
    low = one.stream(prompts([4] * 9), greedy(3), priority=7)
    scheduler = one._runner.scheduler
    one.score(prompts([6]), priority=-1)
    assert len(scheduler.waiting) >= 8, "scored before those that came earlier"
    high = one.stream(prompts([4], seed=2), greedy(3), priority=np.int64(-1))
    assert scheduler.waiting[0] is high.requests[0]
    for stream in (crowd, low, high):
        stream.close()


@pytest.mark.parametrize("priority", [1.0, "1", True, None, [0], [0, "a"], [0, 1, 2]])
def test_bad_priorities(engine, priority):
    one = engine(FAMILY)
    for call in (one.stream, one.score):
        with pytest.raises(RequestError) as caught:
            call([[1], [2]], priority=priority)
        assert caught.value.key.startswith("priority")


def test_priorities_from_asyncio(engine):
    async def main():
        async with AsyncEngine(engine(FAMILY)) as running:
            order = []

            async def read(name, priority, tokens):
                async for _ in running.generate([5, 6, 7], greedy(tokens), priority=priority):
                    order.append(name)

            crowd = [asyncio.create_task(read("crowd", 0, 70 + 3 * n)) for n in range(8)]
            while (await running.stats()).running < 8:
                await asyncio.sleep(0.001)
            low = asyncio.create_task(read("low", 5, 2))
            while not (await running.stats()).waiting:
                await asyncio.sleep(0.001)
            scored = asyncio.create_task(running.score([[4, 5]], priority=-1))
            high = asyncio.create_task(read("high", 1, 2))
            while (await running.stats()).waiting < 3:
                await asyncio.sleep(0.001)
            await asyncio.gather(*crowd, low, high, scored)
            return order

    order = [name for name in asyncio.run(main()) if name != "crowd"]
    assert sorted(order) == ["high", "high", "low", "low"] and order[0] == "high"
