"""The prefix cache on its own, and the scheduler over a memory that remembers what was written."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_moe_jax import SamplingParams
from lora_moe_jax.adapters import Adapter, AdapterConfig
from lora_moe_jax.adapters.entry import Entry
from lora_moe_jax.adapters.pool import AdapterPool
from lora_moe_jax.serving.pages import PagePool
from lora_moe_jax.serving.prefix_cache import CachedPage, PrefixCache
from lora_moe_jax.serving.request import GenerateRequest, Request, ScoreRequest
from lora_moe_jax.serving.scheduler import MAX_PASSES, Scheduler
from lora_moe_jax.serving.step_batch import Chunk, StepBatch
from tests.serving.helpers import no_read, unpacked

PAGE, PAGES_PER_REQUEST = 2, 8


# ---- the cache alone -----------------------------------------------------------------------------
def kept(cache: PrefixCache, text: str, pages: list[int], adapter: Entry | None = None):
    """A chain of pages with two letters each, in use once."""
    chain = cache.find(adapter, text, len(text))
    cache.use(chain)
    for page in pages[len(chain) :]:
        chain.append(cache.add(adapter, cache.key(adapter, text, chain, len(text)), page))
    return chain


def found(cache: PrefixCache, text: str, adapter: Entry | None = None) -> list[int]:
    return [cached.page for cached in cache.find(adapter, text, len(text))]


def test_whole_pages_of_the_same_beginning_are_found():
    cache = PrefixCache(PAGE)
    kept(cache, "abcdef", [7, 8, 9])
    assert found(cache, "abcdef") == [7, 8, 9]
    assert found(cache, "abcdeX") == found(cache, "abcde") == [7, 8]
    assert found(cache, "Xbcdef") == found(cache, "cdef") == found(cache, "a") == []
    assert [c.page for c in cache.find(None, "abcdef", 5)] == [7, 8], "within the limit"


def test_an_adapter_version_is_part_of_what_is_looked_for():
    cache, (one, other) = PrefixCache(PAGE), (entry(), entry())
    kept(cache, "abcd", [0, 1], one)
    kept(cache, "abcd", [2, 3], other)
    kept(cache, "ab", [4])
    assert found(cache, "abcd", one) == [0, 1]
    assert found(cache, "abcd", other) == [2, 3]
    assert found(cache, "abcd") == [4]


def test_tokens_of_one_hash_are_told_apart():
    """-1 and -2 have the same hash in CPython, and so have tuples of them."""
    cache = PrefixCache(PAGE)
    assert hash((-1, -1)) == hash((-2, -2))
    key = cache.key(None, [-1, -1], [], 2)
    cache.add(None, key, 5)
    assert cache.find(None, [-2, -2], 2) == []
    assert [c.page for c in cache.find(None, [-1, -1], 2)] == [5]


def test_of_two_equal_pages_the_first_is_kept():
    cache = PrefixCache(PAGE)
    key = cache.key(None, "ab", [], 2)
    first, second = cache.add(None, key, 3), cache.add(None, key, 4)
    assert first is second and first.page == 3 and first.users == 2 and len(cache) == 1


def test_pages_in_use_stay_and_the_others_go_least_recently_used_first():
    cache = PrefixCache(PAGE)
    chains = {text: kept(cache, text, pages) for text, pages in
              [("abcd", [0, 1]), ("efgh", [2, 3]), ("ijkl", [4, 5])]}  # fmt: skip
    assert cache.idle == 0
    for text in ("efgh", "abcd"):
        cache.release(chains[text])
    again = cache.find(None, "efgh", 4)
    cache.use(again)
    cache.release(again)
    assert cache.idle == 4 and len(cache) == 6
    assert [cache.evict() for _ in range(4)] == [1, 0, 3, 2], "the end of a chain goes first"
    assert found(cache, "ijkl") == [4, 5] and cache.idle == 0 and len(cache) == 2


def test_a_branch_goes_before_what_it_grew_from():
    cache = PrefixCache(PAGE)
    long, short = kept(cache, "abcdef", [0, 1, 2]), kept(cache, "abXY", [0, 3])
    cache.release(long)
    cache.release(short)
    assert [cache.evict() for _ in range(2)] == [2, 1]
    assert found(cache, "abcdef") == [0] and found(cache, "abXY") == [0, 3]
    assert [cache.evict() for _ in range(2)] == [3, 0]
    assert len(cache) == 0


def test_dropping_takes_dead_versions_alone():
    cache, (dead, alive) = PrefixCache(PAGE), (entry(), entry())
    for adapter, pages in ((dead, [0, 1]), (alive, [2, 3]), (None, [4, 5])):
        cache.release(kept(cache, "abcd", pages, adapter))
    assert cache.drop_unloaded() == []
    dead.adapter = None
    assert sorted(cache.drop_unloaded()) == [0, 1]
    assert found(cache, "abcd", dead) == [] and found(cache, "abcd", alive) == [2, 3]
    assert cache.idle == len(cache) == 4


def test_the_pool_takes_idle_pages_when_it_has_no_others():
    pool = PagePool(4, PAGE)
    chain = kept(pool.prefixes, "abcd", pool.take(2))
    assert pool.free == 2
    pool.prefixes.release(chain)
    assert pool.free == 4
    assert pool.take(3) == [2, 3, 1]
    assert found(pool.prefixes, "abcd") == [0] and pool.free == 1


# ---- the scheduler -------------------------------------------------------------------------------
def entry() -> Entry:
    pool = AdapterPool([64], lambda slot, adapter: iter(()), no_read)
    return pool.add("x", no_adapter())


def no_adapter() -> Adapter:
    return Adapter({}, "module", AdapterConfig(r=1, target_modules=("x",)))


class Simulation:
    """A scheduler, and a memory in which each position holds what its value follows from.

    With `behind`, each step is begun before the results of the one before it are known.
    """

    def __init__(
        self,
        pages: int = 16,
        rows: int = 4,
        slots: int = 2,
        chunk: int = 16,
        behind: bool = False,
        decode_steps: int = 1,
    ):
        self.behind = behind
        self.under_way: deque[StepBatch] = deque()
        self.adapters = AdapterPool([64] * slots, lambda slot, adapter: iter(()), no_read)
        self.one = Scheduler(
            PagePool(pages, PAGE),
            self.adapters,
            rows=rows,
            pages_per_request=PAGES_PER_REQUEST,
            token_buckets=(rows, 16),
            prefill_chunk=chunk,
            decode_steps=decode_steps,
        )
        self.memory: dict[tuple[int, int], tuple] = {}
        self.computed = 0

    def generate(
        self,
        tokens: str,
        max_tokens: int = 1,
        name: str | None = None,
        stop: str = "",
        priority: int = 0,
        logprobs: int | None = None,
    ) -> Request:
        adapter = None if name is None else self.adapters.get(name)
        stops = tuple(map(ord, stop))
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, logprobs=logprobs)
        made = GenerateRequest(
            0, list(map(ord, tokens)), len(tokens), adapter, params=params, priority=priority
        )
        self.one.add([made])
        return made

    def score(self, tokens: str, name: str | None = None, priority: int = 0) -> Request:
        adapter = None if name is None else self.adapters.get(name)
        made = ScoreRequest(0, list(map(ord, tokens)), len(tokens), adapter, priority=priority)
        self.one.add([made])
        return made

    def step(self) -> bool:
        """A step as the runner takes it; False if there was nothing to do."""
        first = min(self.one.running, key=lambda r: r.priority, default=None)
        batch = self.one.next_batch()
        assert first is None or first in self.one.running, "the first of the highest made room"
        if batch is not None:
            self._begin(batch)
            self.under_way.append(batch)
        if self.under_way and (batch is None or len(self.under_way) > self.behind):
            done = self.under_way.popleft()
            for chunk in done.chunks:
                self._result(chunk, done.steps)
            return True
        return batch is not None

    def _begin(self, batch: StepBatch) -> None:
        assert batch.top == any(c.samples and c.request.params.logprobs for c in batch.chunks)
        assert batch.steps == 1 or not batch.top
        if not self.behind:
            oldest = self.one.running[0]
            assert oldest in {chunk.request for chunk in batch.chunks}, "it must get on"
        page_tables = unpacked(self.one, batch).rows.page_tables
        written = set()
        for chunk in batch.chunks_now():
            request = chunk.request
            for place in range(chunk.start, chunk.start + chunk.length + batch.steps - 1):
                cell = cell_of(page_tables, request, place)
                assert cell not in written, "two requests write to one place"
                assert cell[0] not in {c.page for c in pages_of(self.one)}, "a kept page is written"
                written.add(cell)
                self.memory[cell] = content(request, place)
                self.computed += 1
        for chunk in batch.chunks_now():
            request = chunk.request
            for place in range(chunk.start + chunk.length + batch.steps - 1):
                assert self.memory[cell_of(page_tables, request, place)] == content(request, place)
        self.one.wrote(batch)
        self.one.write_slots(lambda: True)

    def _result(self, chunk: Chunk, steps: int) -> None:
        request = chunk.request
        for _ in range(steps):
            if request.life != chunk.life:
                return
            request.pending -= chunk.completes
            stopped, wanted = False, 0
            if chunk.samples:
                request.tokens = continued(request.tokens, len(request.tokens) + 1)
                self.one.share(request)
                wanted = request.params.max_tokens
                stopped = request.tokens[-1] in request.params.stop_token_ids
            if stopped or (
                chunk.completes and len(request.tokens) == chunk.request.prompt_length + wanted
            ):
                request.done = True
                self.one.finish(request)

    def run(self, limit: int = 500) -> None:
        """Until nothing is left to do."""
        while self.step():
            limit -= 1
            assert limit, "some request is never done"

    def until_one_makes_room(self) -> None:
        while not self.one.counts["preemptions"]:
            assert self.step(), "all is done, and none has made room"
            self.check()

    def check(self) -> None:
        """What must hold between steps."""
        pool, running = self.one.pool, self.one.running
        cached = pages_of(self.one)
        private = [page for r in running for page in r.pages[len(r.cached) :]]
        everywhere = [*pool._free, *private, *(c.page for c in cached)]
        assert sorted(everywhere) == list(range(pool.total)), "a page is lost, or in two places"
        assert pool.free == pool.total - len({page for r in running for page in r.pages})
        for one in cached:
            assert one.users == sum(one in r.cached for r in running)
            assert (one in pool.prefixes._idle) == (one.users == 0)
            assert not isinstance(one.key[0], CachedPage) or one.key[0] in cached, "cannot be found"
        for request in running:
            assert [c.page for c in request.cached] == request.pages[: len(request.cached)]
            known = min(request.computed, len(request.tokens))
            # Or once the next token is read, if the last one of a page was read before it was fed.
            kept = len(request.cached)
            assert (known - self.behind) // PAGE <= kept <= known // PAGE, "kept at once"
            row = self.one.page_tables[request.row]
            assert row[: len(request.pages)].tolist() == request.pages


def cell_of(page_tables, request: Request, place: int) -> tuple[int, int]:
    return int(page_tables[request.row, place // PAGE]), place % PAGE


def pages_of(one: Scheduler) -> set[CachedPage]:
    return set(one.pool.prefixes._pages.values())


def content(request: Request, place: int) -> tuple:
    """All that a value at a position follows from; later tokens than are known too."""
    return request.adapter, tuple(continued(request.tokens, place + 1)[: place + 1])


def continued(tokens: list[int], length: int) -> list[int]:
    """At least so many tokens, by a rule: requests that begin alike go on alike."""
    tokens = list(tokens)
    while len(tokens) < length:
        tokens.append(ord("a") + (sum(tokens) + len(tokens) // 3) % 2)
    return tokens


@pytest.mark.parametrize(("length", "computed"), [(1, 1), (2, 2), (3, 1), (4, 2), (7, 1), (8, 2)])
def test_all_but_the_last_token_may_be_found(length, computed):
    sim = Simulation()
    sim.generate("abcdefgh")
    sim.run()
    before = sim.computed
    sim.generate("abcdefgh"[:length])
    sim.run()
    assert sim.computed - before == computed
    assert sim.one.counts["prefix_hit_tokens"] == length - computed


def test_generated_tokens_are_found_too():
    sim = Simulation()
    first = sim.generate("abc", max_tokens=6)
    sim.run()
    sim.generate("".join(map(chr, first.tokens)))
    sim.run()
    assert sim.one.counts["prefix_hit_tokens"] == 8, "the last of 9 tokens was never fed"


def test_of_many_samples_of_a_prompt_one_computes_it():
    sim = Simulation(pages=64, rows=8, chunk=4)
    samples = [sim.generate("abcdefghij", max_tokens=3) for _ in range(6)]
    other = sim.generate("xyz", max_tokens=2)
    sim.step()
    assert sim.one.running == [samples[0], other], "those that wait for the first are passed"
    sim.run()
    assert all(r.done for r in samples)
    assert sim.one.counts["prefix_hit_tokens"] == 5 * 8
    assert sim.computed == (10 + 5 * 2 + 6 * 2) + (3 + 1)


def test_closing_the_one_that_computes_lets_the_next_one_do_it():
    sim = Simulation(chunk=2)
    first, second, third = (sim.generate("abcdef") for _ in range(3))
    sim.step()
    sim.one.finish(first)
    sim.check()
    sim.step()
    assert sim.one.running == [second] and list(sim.one.waiting) == [third]
    assert second.computed == 4, "it goes on where the first was closed"
    sim.run()


def test_a_score_computes_all_but_leaves_its_pages():
    sim = Simulation()
    sim.score("abcdef")
    sim.run()
    sim.score("abcdef")
    sim.run()
    assert sim.computed == 12 and sim.one.counts["prefix_hit_tokens"] == 0
    sim.generate("abcdef")
    sim.run()
    assert sim.computed == 14 and len(sim.one.pool.prefixes) == 3


def test_two_that_fill_the_same_page_end_up_with_one():
    sim = Simulation()
    scores = [sim.score("abcdefg") for _ in range(2)]
    sim.one.prefill_chunk = 6
    sim.step()
    sim.check()
    assert scores[0].pages[:3] == scores[1].pages[:3] and sim.one.pool.free == 16 - 5
    sim.run()
    sim.check()


def test_pages_that_are_found_are_not_evicted_for_the_one_that_found_them():
    sim = Simulation(pages=5)
    sim.generate("abcdefgh")
    sim.run()
    assert (sim.one.pool.free, len(sim.one.pool.prefixes)) == (5, 4)
    sim.generate("abcdef1234")  # 2 pages are found, 3 others needed
    sim.run()
    assert sim.one.counts["prefix_hit_tokens"] == 6 and len(sim.one.pool.prefixes) == 5
    sim.check()


def test_idle_pages_do_not_count_twice():
    """Three are free: two that it finds, and one of the two that it needs beside them."""
    sim = Simulation(pages=5)
    sim.generate("abcd")
    sim.run()
    holder = sim.generate("wx", max_tokens=2)
    sim.step()
    assert sim.one.pool.free == 3 and sim.one.pool.prefixes.idle == 2
    waits = sim.generate("abcdefg")
    sim.step()
    assert holder.done and waits.row == -1
    sim.step()
    assert waits.done and sim.one.counts["prefix_hit_tokens"] == 4


def test_a_new_version_finds_nothing_and_the_old_pages_go_at_once():
    sim = Simulation()
    sim.adapters.add("p", no_adapter())
    sim.generate("abcdef", name="p")
    sim.run()
    assert len(sim.one.pool.prefixes) == 3
    old = sim.generate("abcdef", max_tokens=4, name="p")
    sim.step()
    sim.adapters.add("p", no_adapter())
    sim.one.drop_unloaded()
    assert len(sim.one.pool.prefixes) == 3, "the old version is in use"
    new = sim.generate("abcdef", name="p")
    sim.run()
    assert old.done and new.done and sim.one.counts["prefix_hit_tokens"] == 4, (
        "by the old one alone"
    )
    assert {c.adapter for c in pages_of(sim.one)} == {new.adapter}
    sim.adapters.remove("p")
    sim.one.drop_unloaded()
    assert len(sim.one.pool.prefixes) == 0
    sim.check()


def test_the_last_one_makes_room_and_is_the_first_to_come_back():
    sim = Simulation(pages=8)
    first, last = sim.generate("abc", max_tokens=12), sim.generate("xyz", max_tokens=12)
    waits = sim.generate("w" * 8, max_tokens=2)
    sim.until_one_makes_room()
    assert sim.one.running == [first] and list(sim.one.waiting) == [last, waits]
    assert last.row == -1 and last.pages == [] and last.computed == 0
    tokens = list(last.tokens)
    assert len(tokens) > 3, "what it generated stays"
    sim.run()
    assert first.done and last.done and waits.done
    assert len(last.tokens) == 15 and last.tokens[: len(tokens)] == tokens
    assert sim.one.pool.free == 8


def test_what_made_room_is_found_if_it_is_still_there():
    sim = Simulation(pages=8)
    first, last = sim.generate("abc", max_tokens=12), sim.generate("uvwxyz", max_tokens=9)
    sim.until_one_makes_room()
    assert sim.one.counts["prefix_hit_tokens"] == 0 and len(last.tokens) > 6
    sim.one.finish(first)
    before = sim.computed
    sim.step()
    assert last in sim.one.running and sim.computed - before <= 2
    assert sim.one.counts["prefix_hit_tokens"] == 6, "of the prompt"
    sim.run()


def test_who_makes_room_gives_up_its_slot():
    sim = Simulation(pages=8, slots=1)
    sim.adapters.add("p", no_adapter())
    sim.adapters.write_all()
    first, last = sim.generate("abc", max_tokens=12), sim.generate("xyz", max_tokens=12, name="p")
    entry = sim.adapters.get("p")
    sim.until_one_makes_room()
    assert (entry.running, entry.requests) == (0, 1)
    sim.run()
    assert first.done and last.done and (entry.running, entry.requests) == (0, 0)


def test_an_overdue_request_is_not_passed_because_one_that_made_room_is_before_it():
    sim = Simulation(slots=1)
    for name in "pqr":
        sim.adapters.add(name, no_adapter())
    holder = sim.generate("a", max_tokens=9, name="r")
    sim.step()
    queue = [sim.generate("b", name="p"), sim.generate("c", name="q"), sim.generate("d", name="r")]
    queue[1].passed = MAX_PASSES
    sim.step()
    assert sim.one.running == [holder] and list(sim.one.waiting) == queue
    sim.run()


def test_closing_who_made_room():
    sim = Simulation(pages=8)
    sim.generate("abc", max_tokens=12)
    last = sim.generate("xyz", max_tokens=12)
    sim.until_one_makes_room()
    sim.one.finish(last)
    sim.check()
    assert not sim.one.waiting
    sim.run()


def test_a_score_that_makes_room_starts_over():
    score = ScoreRequest(0, [1, 2, 3], 3, None, logprobs=[1], logits=[2], computed=2, row=1)
    score.restart()
    assert (score.logprobs, score.logits, score.computed, score.row) == ([], [], 0, -1)


class Machine(RuleBasedStateMachine):
    """Requests that begin alike come, are closed and end, under adapters that come and go.

    Some go before others.
    """

    behind, decode_steps = False, 1

    def __init__(self):
        super().__init__()
        self.sim = Simulation(pages=12, behind=self.behind, decode_steps=self.decode_steps)
        self.requests: list[Request] = []
        for name in "pqr":
            self.sim.adapters.add(name, no_adapter())

    def unfinished(self) -> list[Request]:
        return [*self.sim.one.running, *self.sim.one.waiting]

    names = st.sampled_from([None, None, "p", "q", "r"])
    prompts = st.text("ab", min_size=1, max_size=9)
    priorities = st.integers(0, 2)

    @rule(
        tokens=prompts,
        max_tokens=st.integers(1, 7),
        name=names,
        copies=st.integers(1, 3),
        stop=st.sampled_from(["", "", "a", "b"]),
        priority=priorities,
        logprobs=st.sampled_from([None, None, 0, 2]),
    )
    def generate(self, tokens, max_tokens, name, copies, stop, priority, logprobs):
        settings = max_tokens, name, stop, priority, logprobs
        for _ in range(copies):
            self.requests.append(self.sim.generate(tokens, *settings))

    @rule()
    def fail(self):
        """A step fails: what is under way is lost."""
        self.sim.under_way.clear()
        self.sim.one.start_over()
        assert not self.sim.one.running

    @rule(tokens=prompts, name=names, priority=priorities)
    def score(self, tokens, name, priority):
        self.requests.append(self.sim.score(tokens, name, priority))

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.sim.step()

    @rule(chunk=st.integers(1, 16))
    def chunks(self, chunk):
        self.sim.one.prefill_chunk = chunk

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def close(self, data):
        request = data.draw(st.sampled_from(self.unfinished()))
        self.sim.one.finish(request)
        self.requests.remove(request)

    @rule(name=st.sampled_from("pqr"), unload=st.booleans())
    def replace(self, name, unload):
        if unload:
            self.sim.adapters.remove(name, "finish")
        self.sim.adapters.add(name, no_adapter())
        self.sim.one.drop_unloaded()

    @invariant()
    def holds(self):
        self.sim.check()
        waiting = [request.priority for request in self.sim.one.waiting]
        assert waiting == sorted(waiting)
        known = {self.sim.adapters.get(name) for name in "pqr"} | {None}
        needed = {request.adapter for request in self.unfinished()}
        assert {c.adapter for c in pages_of(self.sim.one)} <= known | needed

    def teardown(self):
        self.sim.run()
        self.sim.check()
        assert all(request.done for request in self.requests)
        pool = self.sim.one.pool
        assert pool.free == pool.total
        assert sorted(pool.take(pool.total)) == list(range(pool.total))
        assert len(pool.prefixes) == 0


class BehindMachine(Machine):
    """The same while each step is begun before the one before it is read."""

    behind = True


class LoopMachine(BehindMachine):
    """The same with several steps at once where that can be."""

    decode_steps = 3


MANY = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestMachine, TestBehind, TestLoop = (
    machine.TestCase for machine in (Machine, BehindMachine, LoopMachine)
)
TestMachine.settings = TestBehind.settings = TestLoop.settings = MANY
