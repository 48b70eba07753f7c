"""The scheduler and the page pool on their own: nothing here touches a device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_jax import SamplingParams
from lora_moe_jax.serving.pages import PagePool
from lora_moe_jax.serving.request import GenerateRequest, ScoreRequest
from lora_moe_jax.serving.scheduler import Scheduler
from tests.serving.helpers import unpacked

PAGE, MAX_LENGTH = 4, 32


def some_tokens(length: int, index: int) -> list[int]:
    """Not the first ones of any other request."""
    return list(range(100 * index, 100 * index + length))


def scoring(length: int, index: int = 0) -> ScoreRequest:
    return ScoreRequest(index, some_tokens(length, index), length, None)


def generating(length: int, max_tokens: int, index: int = 0) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(index, some_tokens(length, index), length, None, params=params)


def scheduler(rows=4, pages=16, buckets=(4, 16), chunk=16) -> Scheduler:
    return Scheduler(
        PagePool(pages, PAGE),
        rows=rows,
        pages_per_request=MAX_LENGTH // PAGE,
        token_buckets=buckets,
        prefill_chunk=chunk,
    )


def take_results(one: Scheduler, batch) -> None:
    """What the engine does after a step."""
    one.wrote(batch)
    for chunk in batch.chunks:
        request = chunk.request
        request.pending -= chunk.completes
        if chunk.samples:
            request.tokens.append(1)
            one.share(request)
            finished = len(request.generated) == request.params.max_tokens
        else:
            finished = chunk.completes
        if finished:
            request.done = True
            one.finish(request)


def check(one: Scheduler, batch) -> None:
    """What must hold of every step."""
    size, inputs = batch.size, unpacked(one, batch)
    assert len(inputs.tokens) == size
    assert size in one.token_buckets
    assert sum(chunk.length for chunk in batch.chunks) <= size
    smaller = [bucket for bucket in one.token_buckets if bucket < size]
    assert all(sum(chunk.length for chunk in batch.chunks) > bucket for bucket in smaller)
    owners = [page for request in one.running for page in request.pages]
    assert len(owners) == len(set(owners)) and set(owners) <= set(range(one.pool.total))
    assert one.pool.free == one.pool.total - len(owners)
    rows = [request.row for request in one.running]
    assert len(rows) == len(set(rows)) and set(rows) <= set(range(len(one.page_tables)))
    used = np.full(size, -1)
    for chunk in batch.chunks:
        request, span = chunk.request, slice(chunk.offset, chunk.offset + chunk.length)
        assert 1 <= chunk.length <= one.prefill_chunk
        assert (used[span] == -1).all(), "two chunks share a row"
        used[span] = request.row
        assert inputs.tokens[span].tolist() == request.tokens[chunk.start :][: chunk.length]
        assert inputs.positions[span].tolist() == list(range(chunk.start, request.computed))
        pages = inputs.rows.page_tables[request.row].tolist()
        assert pages[: len(request.pages)] == request.pages
        assert request.computed <= len(request.pages) * PAGE
    assert (inputs.request == used).all()
    last = {c.row: c.offset + c.length - 1 for c in batch.chunks if c.samples}
    every_row = range(len(one.page_tables))
    assert inputs.rows.sample_at.tolist() == [last.get(row, -1) for row in every_row]
    for chunk in batch.chunks:
        assert inputs.rows.slots[chunk.row] == -1
        if chunk.samples:
            assert inputs.rows.step[chunk.row] == len(chunk.request.generated)


requests = st.lists(
    st.one_of(
        st.tuples(st.just("score"), st.integers(1, 32), st.just(0)),
        st.tuples(st.just("generate"), st.integers(1, 20), st.integers(1, 12)),
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(
    requests,
    st.integers(1, 4),
    st.integers(8, 20),
    st.integers(1, 16),
    st.lists(st.integers(0, 3), max_size=8),
    st.sets(st.integers(0, 20), max_size=4),
)
def test_every_request_finishes(kinds, rows, pages, chunk, arrivals, closings):
    one = scheduler(rows, pages, chunk=chunk)
    todo = [
        scoring(length, i) if kind == "score" else generating(length, tokens, i)
        for i, (kind, length, tokens) in enumerate(kinds)
    ]
    waiting, admitted, dropped = list(todo), [], []
    for step in range(800):
        arriving = arrivals[step] if step < len(arrivals) else len(waiting)
        one.add(waiting[:arriving])
        waiting = waiting[arriving:]
        oldest = one.running[:1]
        batch = one.next_batch()
        assert one.running[:1] == oldest or not oldest, "the oldest made room for another"
        admitted += [r for r in one.running if r not in admitted]
        if batch is None:
            if not waiting:
                break
            continue
        check(one, batch)
        take_results(one, batch)
        if step in closings and one.running:
            dropped.append(one.running[step % len(one.running)])  # its stream is closed
            one.finish(dropped[-1])
    assert all(r.done or r in dropped for r in todo)
    assert all(r.computed == len(r.tokens) - isinstance(r, GenerateRequest)
               for r in todo if r.done)  # fmt: skip
    assert [r.index for r in admitted] == list(range(len(todo))), "admitted out of order"
    assert one.pool.free == pages and not one.running and not one.waiting
    assert sorted(one.pool.take(pages)) == list(range(pages))


def test_generating_requests_go_before_prompts():
    one = scheduler(buckets=(4, 8), pages=32)
    early = [generating(2, 9, i) for i in range(3)]
    one.add(early)
    take_results(one, one.next_batch())
    one.add([scoring(30, 3)])
    for _ in range(5):
        batch = one.next_batch()
        assert [chunk.request for chunk in batch.chunks[:3]] == early
        assert [chunk.length for chunk in batch.chunks] == [1, 1, 1, 5]
        take_results(one, batch)


def test_a_long_prompt_is_not_overtaken():
    """However many short ones come after it."""
    one = scheduler(rows=4, pages=32, buckets=(4, 8), chunk=8)
    long = scoring(30)
    one.add([long])
    for _ in range(4):
        assert not long.done
        one.add([scoring(8, 1)])
        take_results(one, one.next_batch())
    assert long.done


def test_a_prompt_of_few_tokens_goes_along_with_a_chunk():
    one = scheduler(buckets=(4, 16), chunk=5)
    one.add([scoring(12), scoring(3), scoring(9)])
    assert [chunk.length for chunk in one.next_batch().chunks] == [5, 3, 5]


def test_the_smallest_bucket_that_fits_is_taken():
    one = scheduler(buckets=(4, 16))
    one.add([scoring(4)])
    assert one.next_batch().size == 4
    one.add([scoring(5)])
    assert one.next_batch().size == 16


def test_a_request_waits_for_pages_and_nobody_passes_it():
    one = scheduler(rows=4, pages=8)
    first, second, third = scoring(20), scoring(15), scoring(1)
    one.add([first, second, third])
    batch = one.next_batch()
    assert [chunk.request for chunk in batch.chunks] == [first]
    assert list(one.waiting) == [second, third]
    one.finish(first)
    assert [chunk.request for chunk in one.next_batch().chunks] == [second, third]


def test_finishing_twice_or_while_waiting_gives_nothing_back_twice():
    one = scheduler(rows=1, pages=8)
    first, second = scoring(5), scoring(5)
    one.add([first, second])
    one.next_batch()
    one.finish(second)
    one.finish(first)
    one.finish(first)
    assert one.pool.free == 8 and one.next_batch() is None
    one.add([scoring(3), scoring(3)])
    assert len(one.next_batch().chunks) == 1, "there is one row"


def test_a_request_that_generates_needs_no_page_for_its_last_token():
    one = scheduler(pages=8)
    request = generating(4, 1)
    one.add([request])
    take_results(one, one.next_batch())
    assert request.done and len(request.pages) == 1


@given(st.lists(st.integers(0, 6), max_size=30), st.randoms(use_true_random=False))
def test_the_pool_hands_out_each_page_once(sizes, random):
    pool, held = PagePool(16, 4), []
    for size in sizes:
        if size <= pool.free:
            held.append(pool.take(size))
        elif held:
            pool.give_back(held.pop(random.randrange(len(held))))
        pages = [page for some in held for page in some]
        assert len(set(pages)) == len(pages) == 16 - pool.free


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_needed(tokens, pages):
    assert PagePool(8, 4).needed(tokens) == pages
