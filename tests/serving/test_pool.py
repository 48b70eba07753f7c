"""More adapters than slots: who waits for a slot, who may pass, and that no bit changes by it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_jax import AdapterError, Engine, RequestError, SamplingParams, read_adapter
from lora_moe_jax.adapters import Adapter, AdapterConfig
from lora_moe_jax.adapters.pool import AdapterPool
from lora_moe_jax.serving.pages import PagePool
from lora_moe_jax.serving.request import GenerateRequest
from lora_moe_jax.serving.scheduler import LEAST_PARTS, MAX_PASSES, MOST_PARTS, Scheduler
from tests.adapters.tables import GOLDEN, golden_adapters
from tests.serving.conftest import OPTIONS
from tests.serving.helpers import (
    bits,
    constant_adapter,
    greedy,
    no_read,
    prompts,
    sampled,
    unpacked,
)

FAMILY = "deepseek_v3"
FOLDERS = GOLDEN / FAMILY / "adapters"
SIX = golden_adapters(FAMILY)


# ---- the scheduler alone -------------------------------------------------------------------------
def scheduler(slots: int, names: str, rows: int = 4, pages: int = 64) -> Scheduler:
    """With an adapter for each letter, and a bank that is not there."""
    adapters = AdapterPool([64] * slots, lambda slot, adapter: iter(()), no_read)
    for name in names:
        adapters.add(name, Adapter({}, "module", AdapterConfig(r=1, target_modules=("x",))))
    adapters.write_all()
    return Scheduler(
        PagePool(pages, 4),
        adapters,
        rows=rows,
        pages_per_request=8,
        token_buckets=(rows, 64),
        prefill_chunk=64,
    )


def request(one: Scheduler, name: str, max_tokens: int = 2, length: int = 1) -> GenerateRequest:
    """One that waits in the queue; `-` has no adapter."""
    adapter = None if name == "-" else one.adapters.get(name)
    params = SamplingParams(max_tokens=max_tokens)
    made = GenerateRequest(0, [1] * length, length, adapter, params=params)
    one.add([made])
    return made


def step(one: Scheduler) -> None:
    """One step, as the runner takes it."""
    batch = one.next_batch()
    inputs = unpacked(one, batch)
    for chunk in batch.chunks:
        assert inputs.rows.slots[chunk.row] == chunk.request.slot
        chunk.request.pending -= chunk.completes
        chunk.request.tokens.append(1)
        if len(chunk.request.generated) == chunk.request.params.max_tokens:
            chunk.request.done = True
            one.finish(chunk.request)
    one.write_slots(lambda: True)


def test_who_has_a_slot_passes_who_waits_for_one():
    one = scheduler(2, "abc", rows=8)
    first = [request(one, name, max_tokens=9) for name in "ab"]
    waits = request(one, "c")
    others = [request(one, name) for name in "a-b"]
    step(one)
    assert one.running == [*first, *others] and list(one.waiting) == [waits]
    assert waits.passed == 2, "the one without an adapter does not count"
    one.finish(first[0])
    step(one)
    assert waits not in one.running, "another request of the same adapter still had a token to go"
    step(one)
    assert waits not in one.running and waits.slot == 0, "its adapter was written in this step"
    step(one)
    assert waits in one.running


def test_a_request_whose_adapter_is_being_written_is_passed_by_any():
    """And has its turn before those behind it, whose adapters get no slot that it has."""
    one = scheduler(2, "abc", rows=8)
    first = request(one, "a", max_tokens=9)
    waits, late, base = request(one, "c"), request(one, "b"), request(one, "-")
    batch = one.next_batch()
    assert {chunk.request for chunk in batch.chunks} == {first, base} and waits.slot == 1
    assert waits.passed == 0 and late.slot is None, "nobody has waited in vain for a slot"
    for chunk in batch.chunks:
        chunk.request.pending -= 1
        chunk.request.tokens.append(1)
    more = [request(one, "a"), request(one, "b")]
    assert {chunk.request for chunk in one.next_batch().chunks} == {first, base, more[0]}
    assert waits.slot == 1 and list(one.waiting) == [waits, late, more[1]]
    one.write_slots(lambda: False)
    one.next_batch()
    assert waits in one.running and list(one.waiting) == [late, more[1]]
    one.finish(waits)
    one.next_batch()
    assert late.slot == 1 and late not in one.running


def test_slots_are_written_while_the_device_is_busy_and_some_parts_in_any_case():
    one = scheduler(1, "a")
    parts = []

    def write(slot, adapter):
        for part in range(40):
            parts.append(part)
            yield

    one.adapters._write = write
    one.adapters.add("a", Adapter({}, "module", AdapterConfig(r=1, target_modules=("x",))))
    one.write_slots(lambda: False)
    assert len(parts) == LEAST_PARTS
    one.write_slots(lambda: len(parts) < 10)
    assert len(parts) == 10
    one.write_slots(lambda: True)
    assert len(parts) == 10 + MOST_PARTS
    while one.adapters.writing:
        one.write_slots(lambda: True)
    assert len(parts) == 40
    one.write_slots(lambda: True)


def test_who_waits_for_pages_or_a_row_is_not_passed():
    one = scheduler(1, "ab", rows=3, pages=4)
    running = request(one, "a", max_tokens=9)  # 2 pages
    slotless, large, small = request(one, "b"), request(one, "a", length=12), request(one, "a")
    step(one)
    assert one.running == [running] and list(one.waiting) == [slotless, large, small]


@pytest.mark.parametrize("late", ["a", "-"])
def test_nobody_starves(late):
    """Requests of the adapter in the only slot keep coming, more of them than fit."""
    one = scheduler(1, "ab", rows=3)
    request(one, "a", max_tokens=3)
    waits = request(one, "b", max_tokens=4)
    steps = 0
    while not waits.done:
        request(one, "a", max_tokens=5)
        request(one, late, max_tokens=5)
        step(one)
        steps += 1
        assert waits.passed <= MAX_PASSES and steps < 100
    if late == "a":
        assert waits.passed == MAX_PASSES


def test_those_without_an_adapter_pass_an_overdue_request():
    one = scheduler(1, "ab", rows=MAX_PASSES + 4)
    holder = request(one, "a", max_tokens=9)
    overdue = request(one, "b")
    for _ in range(MAX_PASSES):
        request(one, "a")
    late, base = request(one, "a"), request(one, "-")
    step(one)
    assert overdue.passed == MAX_PASSES
    assert list(one.waiting) == [overdue, late] and base in one.running
    one.finish(holder)
    step(one)
    step(one)
    assert overdue in one.running and list(one.waiting) == [late]


def test_the_order_is_kept_among_those_who_wait_for_a_slot():
    one = scheduler(2, "abcdef", rows=8)
    queue = [request(one, name) for name in "abcdefecf"]
    admitted = []
    while not all(r.done for r in queue):
        step(one)
        admitted += [r for r in queue if r.row >= 0 and r not in admitted]
    names = "".join(r.adapter_name for r in admitted)
    assert names == "abccdeeff", "the second of each goes along with the first"


def test_closing_requests_gives_back_what_they_hold():
    one = scheduler(1, "ab")
    first, second = request(one, "a", max_tokens=9), request(one, "b")
    step(one)
    for _ in range(2):
        one.finish(second)
        one.finish(first)
    for name in "ab":
        entry = one.adapters.get(name)
        assert entry.requests == entry.running == 0
    assert one.next_batch() is None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef-"), st.integers(1, 12)), max_size=40),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(8, 30),
    st.lists(st.integers(0, 5), max_size=20),
    st.sets(st.sampled_from("abcdef"), max_size=2),
)
def test_every_request_finishes(kinds, slots, rows, pages, arrivals, pins):
    one = scheduler(slots, "abcdef", rows, pages)
    for name in sorted(pins)[: slots - 1]:
        one.adapters.pin(name)
    todo, steps, coming = [], 0, list(kinds)
    while coming or not all(r.done for r in todo):
        arriving = arrivals[steps] if steps < len(arrivals) else len(coming)
        todo += [request(one, name, tokens) for name, tokens in coming[:arriving]]
        coming = coming[arriving:]
        if one.running or one.waiting:
            step(one)
        assert all(r.passed <= MAX_PASSES for r in todo)
        assert len({r.adapter for r in one.running} - {None}) <= slots
        steps += 1
        assert steps < 1000
    for name in "abcdef":
        entry = one.adapters.get(name)
        assert entry.requests == entry.running == 0
    assert one.pool.free == pages


# ---- the engine ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small() -> Engine:
    sizes = {"max_adapters": 2, "token_buckets": [32]}
    return Engine.from_pretrained(GOLDEN / FAMILY / "base", **OPTIONS | sizes)


@pytest.fixture(scope="module")
def alone(small) -> dict[str | None, list]:
    """The bits of every adapter's requests when there is no other adapter."""
    found = {None: served(small, None)}
    for name in SIX:
        small.load_adapter("only", FOLDERS / name)
        found[name] = served(small, "only")
        small.unload_adapter("only")
    return found


@pytest.fixture
def one(small, alone):
    """Two slots and six adapters; whatever a test does, nothing compiles and nothing is left."""
    before = small.stats()
    for name in SIX:
        small.load_adapter(name, FOLDERS / name)
    yield small
    for info in small.adapters():
        small.unload_adapter(info.name)
    after = small.stats()
    assert after.compilations == before.compilations
    assert (after.running, after.waiting, after.resident_adapters) == (0, 0, 0)
    assert after.adapter_host_bytes == 0 and after.free_pages == after.total_pages


BATCH = prompts([9, 21])
PARAMS = [greedy(5), sampled(3, 7)]


def served(engine: Engine, name: str | None) -> list:
    return list(map(bits, engine.generate(BATCH, PARAMS, name)))


def test_six_adapters_over_two_slots_in_one_call(one, alone):
    before = one.stats()
    assert (before.adapters, before.resident_adapters, before.free_adapter_slots) == (6, 2, 0)
    names = [None, *SIX]
    outs = one.generate(BATCH * 7, PARAMS * 7, [name for name in names for _ in BATCH])
    found = {name: list(map(bits, outs[2 * i : 2 * i + 2])) for i, name in enumerate(names)}
    assert found == alone
    after = one.stats()
    assert after.adapter_loads - before.adapter_loads == 4
    assert after.adapter_evictions - before.adapter_evictions == 4
    assert after.adapter_host_bytes == before.adapter_host_bytes
    assert [info.slot is not None for info in one.adapters()] == [False] * 4 + [True] * 2


def test_any_order_of_many_requests(one, alone):
    rng = np.random.default_rng(1)
    picks = [(int(rng.integers(2)), [None, *SIX][rng.integers(7)]) for _ in range(60)]
    inputs, names = [BATCH[i] for i, _ in picks], [name for _, name in picks]
    outs = one.generate(inputs, [PARAMS[i] for i, _ in picks], names)
    assert list(map(bits, outs)) == [alone[name][i] for i, name in picks]
    assert [out.adapter for out in outs] == names
    scores = one.score(inputs, names)
    for (i, name), score in zip(picks[:8], scores, strict=False):
        again = one.score([BATCH[i]], [name])[0]
        assert score.logprobs.tobytes() == again.logprobs.tobytes()


def test_writing_a_slot_leaves_running_requests_alone(one, alone):
    stream = one.stream(BATCH[1:], PARAMS[1:], ["attn"])
    next(stream)
    for name in ("experts", "rslora", "per_expert"):  # all through the other slot
        assert served(one, name) == alone[name]
        next(stream)
    one.load_adapter("huge", constant_adapter(one, 1e30))
    one.score([[1, 2]], ["huge"])
    assert bits(list(stream)[-1].completion) == alone["attn"][1]


def test_what_its_owner_changes_after_loading_is_not_served(one, alone):
    """Neither the copy in the slot nor the one that comes back after an eviction."""
    adapter = read_adapter(FOLDERS / "experts", one.bank.projections)
    one.load_adapter("mine", adapter)
    for pair in adapter.pairs.values():
        for array in (pair.a, pair.b, pair.scaling):
            array[...] = np.nan
    adapter.pairs.clear()
    for _ in range(2):
        assert served(one, "mine") == alone["experts"]
        served(one, ["attn", "rslora"])


def test_replacing_under_an_open_stream(one, alone):
    name = "changing"
    one.load_adapter(name, FOLDERS / "attn")
    first = one.adapters()[-1].version
    stream = one.stream(BATCH[:1], PARAMS[:1], name)
    queued = one.stream(BATCH * 5, PARAMS * 5, name)  # more than there are rows
    next(stream)
    info = one.load_adapter(name, FOLDERS / "experts")
    assert info.version == first + 1 and one.adapters()[-1] == info
    for version, source in ((first + 1, "experts"), (first + 2, "rslora")):
        outs = one.generate(BATCH, PARAMS, name)
        assert list(map(bits, outs)) == alone[source]
        assert [out.adapter_version for out in outs] == [version] * 2
        one.load_adapter(name, FOLDERS / "rslora")
    ended = [list(stream)[-1].completion]
    ended += [d.completion for d in sorted(queued, key=lambda d: d.index) if d.completion]
    assert {out.adapter_version for out in ended} == {first}
    assert list(map(bits, ended)) == alone["attn"][:1] + alone["attn"] * 5
    assert one.stats().adapter_host_bytes == sum(info.nbytes for info in one.adapters())


def test_replacing_keeps_an_old_version_for_those_who_wait(one, alone):
    """They were never admitted when it was replaced, and it had no slot."""
    blocking = one.stream([[5]] * 2, greedy(20), ["attn", "experts"])
    next(blocking)
    queued = one.stream(BATCH, PARAMS, "rslora")
    one.load_adapter("rslora", FOLDERS / "per_expert")
    assert one.stats().adapter_host_bytes > sum(info.nbytes for info in one.adapters())
    assert served(one, "rslora") == alone["per_expert"]
    ended = [delta.completion for delta in queued if delta.completion]
    assert list(map(bits, ended)) == alone["rslora"]
    blocking.close()


def test_unloading_that_lets_requests_finish(one, alone):
    stream = one.stream(BATCH[:1], PARAMS[:1], "attn")
    next(stream)
    with pytest.raises(AdapterError, match="in use") as caught:
        one.unload_adapter("attn")
    assert "finish" in caught.value.hint
    nbytes = one.stats().adapter_host_bytes
    one.unload_adapter("attn", when_busy="finish")
    assert "attn" not in {info.name for info in one.adapters()}
    with pytest.raises(RequestError, match="not loaded"):
        one.generate([[1]], greedy(1), "attn")
    assert one.stats().adapter_host_bytes == nbytes and one.stats().free_adapter_slots == 0
    assert bits(list(stream)[-1].completion) == alone["attn"][0]
    assert one.stats().adapter_host_bytes < nbytes and one.stats().free_adapter_slots == 1
    with pytest.raises(AdapterError, match="when_busy"):
        one.unload_adapter("rslora", when_busy="now")


def test_closing_the_last_stream_frees_a_forgotten_adapter(one):
    stream = one.stream(BATCH, greedy(50), "experts")
    one.unload_adapter("experts", when_busy="finish")
    next(stream)
    stream.close()
    assert one.stats().adapter_host_bytes == sum(info.nbytes for info in one.adapters())
    assert one.stats().free_adapter_slots == 1


def test_pins(one, alone):
    info = one.pin_adapter("rslora")
    assert info.pinned and info.slot is not None
    assert {name: served(one, name) for name in SIX} == {name: alone[name] for name in SIX}
    slots = {info.name: info.slot for info in one.adapters()}
    assert slots["rslora"] == info.slot
    with pytest.raises(AdapterError, match="too many adapters are pinned") as caught:
        one.pin_adapter("attn")
    assert "unpin_adapter one of ['rslora']" in caught.value.hint
    assert one.load_adapter("rslora", FOLDERS / "attn").pinned
    assert not one.unpin_adapter("rslora").pinned
    stream = one.stream([[5]] * 2, greedy(60), ["attn", "experts"])
    while one.stats().running < 2:  # one adapter is written between the other's steps
        next(stream)
    with pytest.raises(AdapterError, match="no slot can be had"):
        one.pin_adapter("rslora")
    stream.close()
    assert one.pin_adapter("rslora").slot is not None
    for call in (one.pin_adapter, one.unpin_adapter):
        with pytest.raises(AdapterError, match="no adapter of this name"):
            call("nobody")


def test_no_adapter_starves_in_the_engine(one, alone):
    """Streams keep both slots busy for as long as they are let."""
    crowd = [one.stream([[5]] * 20, greedy(12), name) for name in ("attn", "experts")]
    next(crowd[0])
    waits = one.stream(BATCH, PARAMS, "shared_outer")
    for name in ("attn", "experts"):
        crowd.append(one.stream([[5]] * 200, greedy(12), name))
    steps = one.stats().steps
    assert [bits(d.completion) for d in waits if d.completion] == alone["shared_outer"]
    assert one.stats().steps - steps < 120, "40 requests before it, 8 at a time, and 8 that pass"
    assert one.stats().waiting > 300
    for stream in crowd:
        stream.close()


def test_what_does_not_fit_is_refused_when_it_is_loaded(one, alone):
    """Not when a slot is free for it at last: a write cannot fail."""
    before = one.adapters(), one.stats()
    big = constant_adapter(one, 0.5, rank=17)
    bad = constant_adapter(one, 0.5)
    name = list(bad.pairs)[-1]
    bad.pairs[name] = dataclasses.replace(bad.pairs[name], scaling=np.full(1, np.nan, np.float32))
    for target in ("new", "attn"):
        for source in (big, bad, FOLDERS):
            with pytest.raises(AdapterError):
                one.load_adapter(target, source)
    assert (one.adapters(), one.stats()) == before


def test_adapters_on_disk(one, alone, tmp_path, monkeypatch):
    """All six take turns in two slots; nothing of them is in memory."""
    monkeypatch.setattr(one, "options", dataclasses.replace(one.options, adapter_disk=tmp_path))
    in_memory = one.stats().adapter_host_bytes
    for name in SIX:
        one.load_adapter(name, FOLDERS / name)
    stats = one.stats()
    assert (stats.adapter_host_bytes, stats.adapter_disk_bytes) == (0, in_memory)
    assert all(info.on_disk for info in one.adapters())
    for _ in range(2):
        for name in SIX:
            assert served(one, name) == alone[name]
    assert one.stats().adapter_evictions > stats.adapter_evictions
    for name in SIX:
        one.unload_adapter(name)
    assert one.stats().adapter_disk_bytes == 0
