"""The scheduler and the page pool on their own: nothing here touches a device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lora_moe_jax import SamplingParams
from lora_moe_jax.serving import scheduler as scheduling
from lora_moe_jax.serving.pages import PagePool
from lora_moe_jax.serving.request import GenerateRequest, ScoreRequest
from lora_moe_jax.serving.scheduler import Scheduler
from lora_moe_jax.serving.step_layout import FED_BACK
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
    for chunk in batch.chunks_now():
        request, span = chunk.request, slice(chunk.offset, chunk.offset + chunk.length)
        assert 1 <= chunk.length <= one.prefill_chunk
        assert (used[span] == -1).all(), "two chunks share a row"
        used[span] = request.row
        tokens = request.tokens[chunk.start :][: chunk.length]
        assert inputs.tokens[span].tolist() == ([FED_BACK] if batch.age else tokens)
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


def in_steady_decode(one: Scheduler) -> list[GenerateRequest]:
    """Two that have just entered their second page of `one`, and whose last step sent nothing."""
    made = [generating(3, 20, i) for i in range(2)]
    one.add(made)
    while (batch := one.next_batch()).packed is not None:
        take_results(one, batch)
    take_results(one, batch)
    return made


@pytest.mark.parametrize(
    ("change", "sends"),
    [
        (lambda one, made: None, False),
        (lambda one, made: one.look_again(), False),
        (lambda one, made: one.switch_versions(), False),
        (lambda one, made: one.add([generating(1, 2, 2)]), True),
        (lambda one, made: one.add([scoring(3, 2)]), True),
        (lambda one, made: one.finish(made[0]), True),
        (lambda one, made: one.start_over(), True),
        (lambda one, made: one._preempt(made[1]), True),
    ],
)
def test_what_the_device_has_is_sent_again_only_after_a_change(change, sends):
    one = scheduler(pages=32)
    made = in_steady_decode(one)
    change(one, made)
    assert (one.next_batch().packed is not None) == sends


def sends(one: Scheduler) -> list[int]:
    """Which of the steps that are left send something."""
    found, step = [], 0
    while batch := one.next_batch():
        take_results(one, batch)
        if batch.packed is not None:
            found.append(step)
        step += 1
    return found


def test_a_new_page_is_sent():
    one = scheduler(pages=32)
    one.add([generating(3, 11)])
    # The prompt, with which it gets two pages; the first token; the third page; and the fourth.
    assert sends(one) == [0, 1, 6, 10]


def test_a_page_that_was_filled_twice_is_sent():
    one = scheduler(pages=32)
    one.add([generating(3, 11), generating(3, 11)])
    assert sends(one) == [0, 1, 2, 6, 10], "in step 1 both fill their first page"


def test_a_request_that_ends_by_its_length_is_left_out_at_once():
    one = scheduler(pages=32)
    one.add([generating(5, 20), generating(5, 5, 1)])
    batches = [one.next_batch() for _ in range(8)]  # none is read
    assert [len(batch.chunks) for batch in batches] == [2] * 5 + [1] * 3
    assert [batch.packed is None for batch in batches[:6]] == [False] * 2 + [True] * 3 + [False]


def test_a_filter_and_several_steps_at_once_are_sent():
    one = scheduler(pages=32)
    one.decode_steps = 2
    filtered = generating(3, 20)
    filtered.params = SamplingParams(max_tokens=20, top_k=3)
    one.add([filtered, generating(3, 20, 1)])
    for _ in range(6):
        batch = one.next_batch()
        assert batch.packed is not None and batch.filters and batch.steps == 1
        take_results(one, batch)
    one.finish(filtered)
    for _ in range(3):
        batch = one.next_batch()
        assert batch.packed is not None and batch.steps == 2
    one.add([generating(1, 9, i) for i in range(2, 7)])
    assert [one.next_batch().steps for _ in range(3)] == [1] * 3 and len(one.waiting) == 2
    for waiting in list(one.waiting):
        one.finish(waiting)
    assert one.next_batch().steps == 2, "as soon as none waits"


@pytest.mark.parametrize(
    ("pages", "waiting", "given"),
    [
        (13, 0, [3, 3, 3, 3]),  # one is left, for two
        (14, 0, [3, 4, 4, 3]),
        (21, 1, [3, 3, 3, 3]),  # the one that waits may need 8
        (22, 1, [3, 4, 4, 3]),
    ],
)
def test_with_one_that_lacks_a_page_others_get_theirs_early(pages, waiting, given):
    """The second and the third, two steps early; the last one needs no more."""
    one = scheduler(pages=pages, buckets=(4, 32))
    sizes = [(4, 20), (6, 20), (6, 20), (6, 7)]
    made = [generating(*size, i) for i, size in enumerate(sizes)]
    one.add([*made, *[scoring(1, 4)] * waiting])
    for _ in range(5):
        take_results(one, one.next_batch())
        assert [len(request.pages) for request in made] == [2, 3, 3, 3]
    take_results(one, one.next_batch())
    assert [len(request.pages) for request in made] == given
    assert one.counts["preemptions"] == 0 and len(one.waiting) == waiting


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=4),
    st.integers(8, 20),
)
def test_nobody_makes_room_for_pages_that_were_given_early(kinds, pages):
    def until_one_makes_room(early: int) -> int:
        one, steps = scheduler(pages=pages, chunk=4), 0
        one.add([generating(length, tokens, i) for i, (length, tokens) in enumerate(kinds)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduling, "EARLY", early)
            while (batch := one.next_batch()) and not one.counts["preemptions"]:
                assert not one.waiting
                take_results(one, batch)
                steps += 1
        return steps

    assume(sum(-(-length // PAGE) + 1 for length, _ in kinds) <= pages)
    assert until_one_makes_room(16) == until_one_makes_room(0)


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
