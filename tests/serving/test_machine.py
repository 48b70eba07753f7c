"""Random operations on the pocket model's engine: books that agree, and outputs that are right.

Every output is compared with that of the same request alone, in the same engine, before: no request
may see another's cache, or another adapter's weights. Where a request went on with a new version,
what came before is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from lora_moe_jax import AdapterError, Engine, RequestStream, read_adapter
from lora_moe_jax.adapters import Adapter
from lora_moe_jax.pocket import ADAPTERS, BASE
from lora_moe_jax.serving.request import Request, scores
from tests.serving.helpers import TIGHT, bits, greedy, prompts, sampled, with_options

MOST = 12
LONG = prompts([26], seed=1)[0]
PROMPTS = [*prompts([1, 9]), LONG[:18], LONG]  # the last two begin alike
PARAMS = [lambda count: greedy(count), lambda count: sampled(7, count)]
NAMES = ("p", "q", "r")
SOURCES = sorted(ADAPTERS)


@dataclass(frozen=True)
class World:
    """An engine without adapters, and what each of them gives alone.

    Attributes:
      adapters: by source, in memory.
      slots: the same as arrays: of a slot on the device, or where slots have classes by projection.
      outputs: tokens and logprobs by source, prompt and kind of sampling.
      scores: by source and prompt.
    """

    engine: Engine
    adapters: dict[str, Adapter]
    slots: dict[str, dict]
    outputs: dict[tuple, tuple]
    scores: dict[tuple, bytes]


def alone_in(engine: Engine, *, classes: bool = False) -> World:
    made = World(engine, {}, {}, {}, {})
    engine._runner.scheduler.prefix_cache = False
    for source in (None, *SOURCES):
        name = None
        if source is not None:
            name = "alone"
            made.adapters[source] = read_adapter(ADAPTERS[source], engine.bank.projections)
            slot = engine.load_adapter(name, made.adapters[source]).slot
            made.slots[source] = dict(made.adapters[source].pairs)
            if not classes:
                made.slots[source] = jax.tree.map(lambda x, slot=slot: x[slot], engine.bank.arrays)
        for place, prompt in enumerate(PROMPTS):
            for kind, params in enumerate(PARAMS):
                (out,) = engine.generate([prompt], params(MOST), [name])
                made.outputs[source, place, kind] = bits(out)
            made.scores[source, place] = engine.score([prompt], [name])[0].logprobs.tobytes()
        if name is not None:
            engine.unload_adapter(name)
    for place in range(1, len(PROMPTS)):
        alone = {made.scores[source, place] for source in (None, *SOURCES)}
        assert len(alone) == 1 + len(SOURCES), "a wrong adapter would be noticed"
    return made


@pytest.fixture(scope="module")
def alone(tight) -> World:
    return alone_in(with_options(tight))


CLASSES = pytest.param("classes", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["finish", "switch", CLASSES])
def world(request, tight) -> World:
    """What comes of a request alone is the same under both policies; slots may be of two ranks."""
    if request.param == "classes":
        ranks = TIGHT | {"max_rank": {8: 1, 16: 1}}
        engine = Engine.from_pretrained(BASE, **ranks, update_policy="switch")
        alone = alone_in(engine, classes=True)
    else:
        engine = with_options(tight, update_policy=request.param)
        alone = request.getfixturevalue("alone")
    for source in SOURCES:
        for name in NAMES[:2]:  # compiles for a slot of each rank
            engine.update_adapter(name, alone.slots[source])
        for name in NAMES[:2]:
            engine.unload_adapter(name)
    engine._runner.scheduler.prefix_cache = True
    return dataclasses.replace(alone, engine=engine)


@dataclass(eq=False)
class Open:
    """A stream, with what each of its requests should give and has given.

    Attributes:
      expected: tokens and logprobs by the adapter's version, which may be a later one.
      named: the adapter and its version when the stream was opened.
    """

    stream: RequestStream
    expected: list[Callable[[int | None], tuple]]
    counts: list[int]
    named: list[tuple[str | None, int | None]]
    found: list[list]
    switches: bool

    def read(self, count: int) -> bool:
        """Takes so many deltas; whether there are no more."""
        for _ in range(count):
            delta = next(self.stream, None)
            if delta is None:
                assert all(found and found[-1] is None for found in self.found), "one was lost"
                return True
            found = self.found[delta.index]
            assert not found or found[-1] is not None, "something came after the end"
            if delta.token_id is not None:
                logprob = np.float32(delta.logprob).tobytes()
                found.append((delta.token_id, logprob, delta.adapter_version))
            if delta.completion is not None:
                self._check_end(delta.index, delta.completion)
                found.append(None)
        return False

    def _check_end(self, index: int, completion) -> None:
        tokens, logprobs = bits(completion)
        count = len(tokens)
        if completion.finish_reason != "abort":
            assert count == self.counts[index]
        came, came_logprobs, versions = (
            tuple(each[part] for each in self.found[index]) for part in range(3)
        )
        assert (came, b"".join(came_logprobs)) == (tokens, logprobs)
        name, version = self.named[index]
        assert completion.adapter == name
        if name is None:
            assert completion.adapter_versions is None and set(versions) <= {None}
        else:
            assert completion.adapter_versions == list(versions) == sorted(versions)
        began = completion.adapter_version
        if not self.switches:
            assert (began, set(versions) | {version}) == (version, {version})
        assert name is None or began >= version
        pure = versions.count(began)  # those after it were computed on an older cache
        wanted, wanted_logprobs = self.expected[index](began)
        assert tokens[:pure] == wanted[:pure]
        assert logprobs[: 4 * pure] == wanted_logprobs[: 4 * pure]


def pick(choice: int, things: Sequence):
    """One of the things, of which there are few."""
    return things[choice % len(things)]


class Machine(RuleBasedStateMachine):
    """Three names over two slots, three rows, and pages for fewer requests than rows.

    What is drawn depends on nothing: how far the engine is depends on when a file has been read,
    and hypothesis refuses what it draws once and not again. So rules are always there, and do
    nothing where there is nothing to do it to; which of some things is a number, see `pick`.
    """

    def __init__(self, world: World):
        super().__init__()
        self.world, self.engine = world, world.engine
        self.compilations = self.engine.stats().compilations
        self.loaded: dict[str, tuple[str, int]] = {}  # name -> source, version
        self.sources_of: dict[tuple[str | None, int | None], str | None] = {(None, None): None}
        self.switches = self.engine.options.update_policy == "switch"
        self.scores: list[tuple[RequestStream, int]] = []
        self.pinned: set[str] = set()
        self.open: list[Open] = []

    names, sources = st.sampled_from(NAMES), st.sampled_from(SOURCES)
    places, kinds = st.integers(0, len(PROMPTS) - 1), st.integers(0, len(PARAMS) - 1)
    choices = st.integers(0, 11)

    def unfinished(self, name: str) -> list[Request]:
        """Those that use the newest version."""
        scheduler = self.engine._runner.scheduler
        entry = self.engine._adapters.get(name)
        return [r for r in (*scheduler.running, *scheduler.waiting) if r.adapter is entry]

    def runs(self, name: str) -> bool:
        """Whether a request runs with the newest version of a name, if there is one."""
        running = self.engine._runner.scheduler.running
        return name in self.loaded and any(r in running for r in self.unfinished(name))

    def source(self, name: str | None) -> tuple[str | None, int | None]:
        return self.loaded.get(name, (None, None))

    def pick_name(self, choice: int) -> str | None:
        return pick(choice, [None, *sorted(self.loaded)])

    def now(self, name: str, source: str, version: int) -> None:
        self.loaded[name] = source, version
        self.sources_of[name, version] = source

    # Adapters

    @rule(name=names, source=sources)
    def load(self, name, source):
        """A new name, or a new version under it. Running requests that go on with it may need a
        slot of a larger rank at once."""
        before = self.engine.adapters()
        goes_on = self.switches and self.runs(name)
        try:
            info = self.engine.load_adapter(name, self.world.adapters[source])
        except AdapterError as error:
            assert self.engine.adapters() == before
            if not (goes_on and "no slot can be had" in str(error)):
                assert "larger rank" in str(error) and name in self.pinned
            return
        assert info.version > self.loaded.get(name, ("", 0))[1]
        self.now(name, source, info.version)

    @rule(name=names, source=sources)
    def update(self, name, source):
        """The same from the device, where a slot is needed at once."""
        before = self.engine.adapters()
        try:
            info = self.engine.update_adapter(name, self.world.slots[source])
        except AdapterError as error:
            assert self.engine.adapters() == before
            if "no slot can be had" not in str(error):
                assert "larger rank" in str(error) and name in self.pinned
            return
        assert info.slot is not None
        self.now(name, source, info.version)

    @rule(choice=choices, when_busy=st.sampled_from(["refuse", "finish"]))
    def unload(self, choice, when_busy):
        if not self.loaded:
            return
        name = pick(choice, sorted(self.loaded))
        if when_busy == "refuse" and self.unfinished(name):
            with pytest.raises(AdapterError, match="in use"):
                self.engine.unload_adapter(name)
            return
        self.engine.unload_adapter(name, when_busy)
        del self.loaded[name]
        self.pinned.discard(name)

    @rule(choice=choices)
    def pin_or_unpin(self, choice):
        if not self.loaded:
            return
        name = pick(choice, sorted(self.loaded))
        if name in self.pinned:
            self.engine.unpin_adapter(name)
            self.pinned.remove(name)
            return
        with contextlib.suppress(AdapterError):  # one slot must stay, or all are in use
            assert self.engine.pin_adapter(name).slot is not None
            self.pinned.add(name)

    # Requests

    @rule(data=st.data(), count=st.integers(1, 3), priority=st.integers(0, 1))
    def submit(self, data, count, priority):
        places, kinds, chosen, counts = (
            [data.draw(each) for _ in range(count)]
            for each in (self.places, self.kinds, self.choices, st.integers(1, MOST))
        )
        names = [self.pick_name(choice) for choice in chosen]
        stream = self.engine.stream(
            [PROMPTS[place] for place in places],
            [PARAMS[kind](count) for kind, count in zip(kinds, counts, strict=True)],
            names,
            priority,
        )
        expected = [
            functools.partial(self.expected, *each)
            for each in zip(names, places, kinds, strict=True)
        ]
        named = [(name, self.source(name)[1]) for name in names]
        found = [[] for _ in names]
        self.open.append(Open(stream, expected, counts, named, found, self.switches))

    def expected(self, name, place, kind, version) -> tuple:
        return self.world.outputs[self.sources_of[name, version], place, kind]

    @rule(choice=choices, count=st.integers(1, 12))
    def read(self, choice, count):
        if self.open:
            one = pick(choice, self.open)
            if one.read(count):
                self.open.remove(one)

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            if self.engine._runner.scheduler.unfinished:
                self.engine._runner.step()

    @rule(choice=choices, request=choices)
    def abort(self, choice, request):
        if self.open:
            one = pick(choice, self.open)
            one.stream.abort(pick(request, range(len(one.counts))))

    @rule(choice=choices)
    def close(self, choice):
        if self.open:
            one = pick(choice, self.open)
            self.open.remove(one)
            one.stream.close()

    @rule(choice=choices, place=places)
    def score(self, choice, place):
        name = self.pick_name(choice)
        (score,) = self.engine.score([PROMPTS[place]], [name])
        source, version = self.source(name)
        assert score.logprobs.tobytes() == self.world.scores[source, place]
        assert (score.adapter, score.adapter_version) == (name, version)

    @rule(choice=choices, place=places)
    def open_score(self, choice, place):
        """One that takes its turn with the others."""
        name = self.pick_name(choice)
        stream = self.engine._open_scores([PROMPTS[place]], [name], False, 0, 0)
        self.scores.append((stream, place))

    @rule()
    def end_score(self):
        if not self.scores:
            return
        stream, place = self.scores.pop(0)
        assert list(stream) == []
        (score,) = scores(stream.requests)
        source = self.sources_of[score.adapter, score.adapter_version]
        assert score.logprobs.tobytes() == self.world.scores[source, place]

    # What holds

    @invariant()
    def every_page_is_with_one(self):
        scheduler = self.engine._runner.scheduler
        pool, running = scheduler.pool, scheduler.running
        cached = list(pool.prefixes._pages.values())
        private = [page for r in running for page in r.pages[len(r.cached) :]]
        pages = [*pool._free, *(one.page for one in cached), *private]
        assert sorted(pages) == list(range(pool.total))
        users = Counter(one for r in running for one in r.cached)
        assert {one: one.users for one in cached if one.users} == users
        assert pool.free == len(pool._free) + sum(not one.users for one in cached)
        for request in running:
            assert request.pages[: len(request.cached)] == [one.page for one in request.cached]
            assert request.mixed or {one.adapter for one in request.cached} <= {request.adapter}
            assert not request.mixed or self.switches
        gone = {one for one in cached if one.adapter and one.adapter.adapter is None}
        assert gone <= {one for request in running if request.mixed for one in request.cached}

    @invariant()
    def every_row_is_with_one(self):
        scheduler = self.engine._runner.scheduler
        rows = [*scheduler._free_rows, *(r.row for r in scheduler.running)]
        assert sorted(rows) == list(range(TIGHT["max_requests"]))
        for request in scheduler.running:
            if request.computed:
                assert scheduler._rows.values.slots[request.row] == request.slot

    @invariant()
    def every_slot_is_with_one(self):
        scheduler, pool = self.engine._runner.scheduler, self.engine._adapters
        unfinished = [*scheduler.running, *scheduler.waiting]
        running = Counter(r.adapter for r in scheduler.running if r.adapter)
        requests = Counter(r.adapter for r in unfinished if r.adapter)
        entries = {*pool._entries.values(), *pool._retired}
        assert set(requests) <= entries and pool._retired <= set(requests)
        for entry in entries:
            assert (entry.running, entry.requests) == (running[entry], requests[entry])
            assert entry.adapter is not None
            assert entry.slot is not None or not entry.running
        held = {entry.slot: entry for entry in entries if entry.slot is not None}
        assert held == {slot: entry for slot, entry in enumerate(pool._slots) if entry}

    @invariant()
    def names_stand_for_what_was_loaded(self):
        infos = self.engine.adapters()
        found = {info.name: info.version for info in infos}
        assert found == {name: version for name, (_, version) in self.loaded.items()}
        assert {info.name for info in infos if info.pinned} == self.pinned
        assert self.engine.stats().compilations == self.compilations

    def teardown(self):
        """All that is open comes to its end, and leaves nothing."""
        try:
            while self.open:
                self.open[0].read(1000)
                del self.open[0]
            while self.scores:
                self.end_score()
        finally:
            for stream in [*(one.stream for one in self.open), *(each for each, _ in self.scores)]:
                stream.close()
            for info in self.engine.adapters():
                self.engine.unload_adapter(info.name)
        stats, pool = self.engine.stats(), self.engine._runner.scheduler.pool
        assert (stats.running, stats.waiting, stats.resident_adapters) == (0, 0, 0)
        assert stats.adapter_host_bytes == 0 and stats.free_pages == stats.total_pages
        pool.give_back(pool.take(pool.free))  # the next example begins with an empty cache
        assert len(pool.prefixes) == 0


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_random_operations(world, examples):
    run_state_machine_as_test(
        lambda: Machine(world),
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,  # a third of which find nothing to do
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
