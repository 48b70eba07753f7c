"""The pool of adapters on its own: no device, and a list in place of the bank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from lora_moe_jax import AdapterError
from lora_moe_jax.adapters import Adapter, AdapterConfig, LoraPair
from lora_moe_jax.adapters.device_params import DeviceParams, InSlot
from lora_moe_jax.adapters.entry import Entry
from lora_moe_jax.adapters.pool import AdapterPool


def adapter(rank: int = 1) -> Adapter:
    one = np.ones((1, rank, 2), np.float32)
    pair = LoraPair(one, one, np.ones(1, np.float32), np.full(1, rank, np.int32))
    name = "model.layers.0.self_attn.q_proj"
    return Adapter({name: pair}, "module", AdapterConfig(r=rank, target_modules=("q_proj",)))


class Written(list):
    """What is in each slot, as `write` left it: None where a part is missing."""

    PARTS = 3

    def __call__(self, slot: int, adapter: Adapter | DeviceParams) -> Iterator[None]:
        for _ in range(self.PARTS - 1):
            self[slot] = None
            yield
        self[slot] = adapter

    def read(self, slot: int, held: InSlot) -> Adapter:
        assert self[slot].in_slot is held, "the slot holds something else by now"
        return adapter(held.rank)


def make(
    slots: int | tuple[int, ...], names: str = "", switch: bool = False
) -> tuple[AdapterPool, Written, dict[str, Entry]]:
    """A pool of so many slots, or of slots of these ranks, with an adapter for each letter."""
    ranks = [64] * slots if isinstance(slots, int) else slots
    written = Written([None] * len(ranks))
    pool = AdapterPool(ranks, written, written.read, switch=switch)
    entries = {name: pool.add(name, adapter()) for name in names}
    pool.write_all()
    return pool, written, entries


def params(rank: int = 1) -> DeviceParams:
    """What comes from a device: nothing is there."""
    return DeviceParams({}, InSlot({"model.layers.0.self_attn.q_proj": rank}))


def run(pool: AdapterPool, entry: Entry) -> bool:
    """A request that is admitted at once, if it can be."""
    pool.begin(entry)
    return pool.acquire(entry)


def stop(pool: AdapterPool, entry: Entry) -> None:
    pool.release(entry)
    pool.end(entry)


def slots(entries: dict[str, Entry]) -> dict[str, int]:
    return {name: entry.slot for name, entry in entries.items() if entry.slot is not None}


# ---- values from a device ------------------------------------------------------------------------
def test_an_update_takes_the_slot_of_the_version_before():
    pool, written, entries = make(2, "ab")
    new = pool.update("a", params(3))
    assert (new.slot, new.info.version, new.info.nbytes, new.info.layout) == (0, 2, 0, "device")
    assert new.info.targets == ("self_attn.q_proj",) and new.info.rank == 3
    assert entries["a"].adapter is None and isinstance(written[0], DeviceParams)
    assert pool.host_bytes == entries["b"].info.nbytes


@pytest.mark.parametrize("kind", ["add", "update"])
def test_a_successor_takes_slot_and_requests(kind):
    """One slot is enough while requests run; they end by the entry that they are with then."""
    pool, written, entries = make(1, "a", switch=True)
    old = entries["a"]
    assert run(pool, old)
    pool.begin(old)  # waits
    for turn in range(3):
        values = adapter(2) if kind == "add" else params(2)
        new = getattr(pool, kind)("a", values)
        assert old.successor is new and (old.slot, old.adapter) == (None, None)
        assert (old.requests, old.running) == (0, 0)
        assert (new.slot, new.requests, new.running) == (0, 2, 1)
        assert (new.info.version, written[0]) == (turn + 2, values)
        old = new
    assert (pool.resident, pool.evictions, pool._retired) == (1, 0, set())
    assert pool.host_bytes == new.info.nbytes
    stop(pool, new)
    assert pool.acquire(new)
    stop(pool, new)
    pool.remove("a")
    assert pool.free == 1


def test_a_successor_of_one_without_a_slot():
    """It takes the requests, and a slot where an idle adapter has one; a pin goes along."""
    pool, written, entries = make(2, "abc", switch=True)
    assert run(pool, entries["a"]) and run(pool, entries["b"])
    pool.begin(entries["c"])
    with pytest.raises(AdapterError, match="no slot can be had"):
        pool.update("c", params())
    assert (entries["c"].successor, entries["c"].requests) == (None, 1)
    loaded = pool.add("c", adapter(2))
    assert (loaded.slot, loaded.requests, entries["c"].adapter) == (None, 1, None)
    stop(pool, entries["a"])
    updated = pool.update("c", params())
    assert (updated.slot, updated.requests, entries["a"].slot) == (0, 1, None)
    pool.pin("c")
    pinned = pool.update("c", params(3))
    assert (pinned.slot, pinned.info.pinned, updated.info.pinned) == (0, True, False)
    assert isinstance(written[0], DeviceParams) and pool.loads == 4


def test_what_was_unloaded_has_no_successor():
    pool, _, entries = make(2, "a", switch=True)
    assert run(pool, entries["a"])
    pool.remove("a", "finish")
    new = pool.update("a", params())
    assert (new.slot, new.requests, new.info.version) == (1, 0, 2)
    assert (entries["a"].slot, entries["a"].successor, entries["a"].running) == (0, None, 1)
    stop(pool, entries["a"])
    assert pool.free == 1


def test_an_update_goes_beside_a_version_that_runs():
    pool, _, entries = make(2, "ab")
    assert run(pool, entries["a"])
    new = pool.update("a", params())
    assert (entries["a"].slot, new.slot, entries["b"].slot) == (0, 1, None)
    assert run(pool, new)
    with pytest.raises(AdapterError, match="no slot can be had") as caught:
        pool.update("b", params())
    assert "larger max_adapters" in caught.value.hint
    assert pool.get("b") is entries["b"] and entries["b"].info.version == 1
    stop(pool, entries["a"])
    assert entries["a"].adapter is None and pool.update("b", params()).slot == 0


def test_the_host_gets_a_copy_when_the_slot_goes():
    pool, written, entries = make(1, "a")
    new = pool.update("n", params(2))
    assert entries["a"].slot is None and pool.host_bytes == entries["a"].info.nbytes
    assert run(pool, entries["a"])
    assert isinstance(new.adapter, Adapter) and new.info.nbytes == new.adapter.nbytes > 0
    assert not run(pool, new)
    stop(pool, entries["a"])
    assert pool.acquire(new) and written[0] is new.adapter


def test_a_pinned_adapter_is_updated_where_it_is():
    pool, _, entries = make(2, "ab")
    pool.pin("a")
    assert run(pool, entries["b"])
    assert pool.update("a", params()).info.pinned
    with pytest.raises(AdapterError, match="no slot can be had"):
        pool.update("b", params())


def test_clearing_the_slots_and_placing_the_pinned():
    pool, written, entries = make(3, "abc")
    pool.pin("b")
    new = pool.update("c", params())
    pool.clear_slots()
    assert pool.free == 3 and isinstance(new.adapter, Adapter)
    written[:] = [None] * 3
    pool.place_pinned()
    pool.write_all()
    assert slots(entries) == {"b": 0} and written[0] is entries["b"].adapter


# ---- slots ---------------------------------------------------------------------------------------
def test_free_slots_are_filled_in_order_and_then_no_more():
    pool, written, entries = make(2, "abc")
    assert slots(entries) == {"a": 0, "b": 1}
    assert written == [entries["a"].adapter, entries["b"].adapter]
    assert (pool.resident, pool.free, pool.loads, pool.evictions) == (2, 0, 2, 0)
    assert [info.slot for info in pool] == [0, 1, None]


def test_the_least_recently_used_makes_room():
    pool, written, entries = make(2, "abcd")
    assert run(pool, entries["a"])
    stop(pool, entries["a"])
    assert run(pool, entries["c"])
    assert slots(entries) == {"a": 0, "c": 1}
    stop(pool, entries["c"])
    assert run(pool, entries["d"]), "a is older than c now"
    assert slots(entries) == {"d": 0, "c": 1}
    assert written == [entries["d"].adapter, entries["c"].adapter]
    assert (pool.loads, pool.evictions) == (4, 2)


def test_the_end_of_a_request_is_a_use_too():
    pool, _, entries = make(2, "abc")
    assert run(pool, entries["a"]) and run(pool, entries["b"])
    stop(pool, entries["b"])
    stop(pool, entries["a"])
    assert run(pool, entries["c"]) and slots(entries) == {"a": 0, "c": 1}


def test_nobody_takes_the_slot_of_a_running_request():
    pool, _, entries = make(2, "abc")
    assert run(pool, entries["a"]) and run(pool, entries["a"]) and run(pool, entries["b"])
    assert not run(pool, entries["c"])
    stop(pool, entries["a"])
    assert not pool.acquire(entries["c"]), "another request still runs with a"
    stop(pool, entries["a"])
    assert pool.acquire(entries["c"]) and slots(entries) == {"b": 1, "c": 0}


def test_a_request_that_only_waits_keeps_no_slot():
    pool, _, entries = make(1, "ab")
    pool.begin(entries["a"])
    assert run(pool, entries["b"]) and entries["a"].slot is None
    stop(pool, entries["b"])
    assert pool.acquire(entries["a"])


def test_adapters_that_need_slots_at_the_same_time():
    pool, _, entries = make(2, "abc")
    assert pool.place_all(["c", "a"]) == [entries["c"].slot, entries["a"].slot]
    assert run(pool, entries["b"])
    with pytest.raises(AdapterError, match="no slot can be had") as error:
        pool.place_all(["a", "c"])
    assert error.value.key == "c"
    with pytest.raises(AdapterError, match="is loaded"):
        pool.place_all(["a", "none"])
    assert all(not entry.running for name, entry in entries.items() if name != "b")
    assert pool.place_all([]) == []


# ---- versions ------------------------------------------------------------------------------------
def test_replacing_an_idle_adapter_takes_its_slot():
    pool, written, entries = make(2, "ab")
    old, new = entries["a"], pool.add("a", adapter(3))
    assert (new.info.version, new.info.rank, new.slot) == (2, 3, 0)
    pool.write_all()
    assert old.slot is None and old.adapter is None
    assert written[0] is new.adapter and pool.evictions == 0
    assert [info.name for info in pool] == ["a", "b"]


def test_requests_keep_the_version_they_began_with():
    pool, written, entries = make(2, "a")
    old = entries["a"]
    assert run(pool, old)
    pool.begin(old)  # another one waits
    new = pool.add("a", adapter())
    assert pool.get("a") is new and (old.slot, new.slot) == (0, 1)
    assert pool.host_bytes == old.info.nbytes + new.info.nbytes
    stop(pool, old)
    assert old.adapter is not None and old.slot == 0
    assert run(pool, new) and run(pool, pool.add("b", adapter()))
    assert old.slot is None and old.adapter is not None, "evicted while a request waits with it"
    stop(pool, pool.get("b"))
    assert pool.acquire(old), "and it comes back"
    assert written[old.slot] is old.adapter
    stop(pool, old)
    assert old.slot is None and old.adapter is None
    assert pool.host_bytes == sum(info.nbytes for info in pool)


def test_versions_count_on_after_unloading():
    pool, _, _ = make(1, "a")
    pool.remove("a")
    assert pool.add("a", adapter()).info.version == 2
    assert pool.add("b", adapter()).info.version == 1


# ---- unloading -----------------------------------------------------------------------------------
def test_unloading_refuses_while_a_request_waits_or_runs():
    pool, _, entries = make(1, "a")
    pool.begin(entries["a"])
    for _ in range(2):
        with pytest.raises(AdapterError, match="in use") as caught:
            pool.remove("a")
        assert "finish" in caught.value.hint and caught.value.found == "1 unfinished request(s)"
        pool.acquire(entries["a"])
    stop(pool, entries["a"])
    pool.remove("a")
    assert pool.free == 1 and pool.host_bytes == 0 and list(pool) == []


def test_unloading_that_lets_requests_finish():
    pool, _, entries = make(2, "ab")
    old = entries["a"]
    run(pool, old)
    pool.pin("a")
    pool.remove("a", "finish")
    with pytest.raises(AdapterError, match="no adapter of this name"):
        pool.get("a")
    assert old.slot == 0 and old.adapter is not None and not old.info.pinned
    new = pool.add("a", adapter())
    assert new.info.version == 2 and new.slot is None
    stop(pool, old)
    assert old.slot is None and old.adapter is None and pool.free == 1
    pool.remove("b", "finish")
    assert pool.free == 2, "nobody used it"


class Somebody:
    """Who trains."""


def test_only_its_trainer_replaces_an_adapter_and_nobody_unloads_it():
    pool, _, _ = make(2, "b")
    trainer = Somebody()
    pool.update("a", params(), trainer)
    before = list(pool)
    for other in (None, Somebody()):
        with pytest.raises(AdapterError, match="in training"):
            pool.check_trainer("a", other)
    for when_busy in ("refuse", "finish"):
        with pytest.raises(AdapterError, match="in training"):
            pool.remove("a", when_busy)
    assert list(pool) == before
    pool.check_trainer("a", trainer)
    pool.check_trainer("b", trainer)
    assert pool.update("a", params(), trainer).info.version == 2
    pool.end_training("a")
    pool.end_training("b")  # it had none
    pool.check_trainer("a", Somebody())
    pool.remove("a")


def test_a_trainer_that_is_gone_has_nothing():
    pool, _, _ = make(1, "")
    trainer = Somebody()
    pool.update("a", params(), trainer)
    del trainer
    pool.check_trainer("a")
    pool.remove("a")


@pytest.mark.parametrize("way", ["", "wait", None, 3])
def test_no_other_way_of_unloading(way):
    pool, _, _ = make(1, "a")
    with pytest.raises(AdapterError) as caught:
        pool.remove("a", way)
    assert caught.value.key == "when_busy" and "finish" in str(caught.value.expected)
    assert pool.get("a")


# ---- pins ----------------------------------------------------------------------------------------
def test_a_pinned_adapter_is_resident_and_stays():
    pool, _, entries = make(2, "abcd")
    assert pool.pin("c").pinned and entries["c"].slot == 0, "a was used before b"
    for name in "abdab":
        assert run(pool, entries[name])
        stop(pool, entries[name])
    assert entries["c"].slot == 0
    assert pool.pin("c") == entries["c"].info, "again changes nothing"
    assert not pool.unpin("c").pinned and not pool.unpin("c").pinned
    assert run(pool, entries["a"]) and run(pool, entries["b"]) and entries["c"].slot is None


def test_one_slot_is_never_pinned():
    pool, _, entries = make(2, "abc")
    pool.pin("a")
    with pytest.raises(AdapterError, match="too many adapters are pinned") as caught:
        pool.pin("c")
    assert "unpin_adapter one of ['a']" in caught.value.hint
    assert "max_adapters" in caught.value.hint
    assert slots(entries) == {"a": 0, "b": 1}
    only, _, _ = make(1, "a")
    with pytest.raises(AdapterError, match="too many"):
        only.pin("a")


def test_pinning_needs_a_slot_that_nobody_uses():
    pool, _, entries = make(3, "abcd")
    pool.pin("a")
    run(pool, entries["b"]), run(pool, entries["c"])
    with pytest.raises(AdapterError, match="no slot can be had") as caught:
        pool.pin("d")
    assert "close streams" in caught.value.hint and "['a']" in caught.value.hint
    assert entries["d"].slot is None and not entries["d"].info.pinned
    stop(pool, entries["b"])
    assert pool.pin("d").slot == entries["d"].slot == 1


def test_a_new_version_inherits_the_pin():
    pool, _, entries = make(3, "abc")
    pool.pin("a")
    run(pool, entries["a"]), run(pool, entries["b"])
    new = pool.add("a", adapter())
    assert new.info.pinned and new.slot == 2, "c made room"
    assert not entries["a"].info.pinned and entries["a"].slot == 0
    run(pool, new)
    newest = pool.add("a", adapter())
    assert newest.info.pinned and newest.slot is None, "there was none"
    with pytest.raises(AdapterError, match="no slot can be had"):
        pool.pin("a")
    stop(pool, entries["a"])
    assert pool.acquire(newest) and newest.slot == 0


# ---- slots that are written in parts -------------------------------------------------------------
def begun(slots: int, names: str) -> tuple[AdapterPool, Written, dict[str, Entry]]:
    """A pool where the first slots have adapters, and the last of the names is being written."""
    pool, written, entries = make(slots, names)
    last = entries[names[-1]]
    pool.begin(last)
    assert not pool.acquire(last, at_once=False) and pool.writing and last.slot is not None
    return pool, written, entries


def test_a_request_waits_for_the_last_part():
    pool, written, entries = begun(2, "abc")
    entry, loads = entries["c"], pool.loads
    for done in (False, False, True):
        assert not pool.acquire(entry, at_once=False) and written[entry.slot] is not entry.adapter
        assert pool.write_part() == done
    assert not pool.writing and pool.acquire(entry, at_once=False)
    assert written[entry.slot] is entry.adapter and pool.loads == loads


def test_nobody_takes_a_slot_that_is_being_written():
    pool, _, entries = begun(2, "abc")
    pool.begin(entries["b"])
    assert pool.acquire(entries["b"], at_once=False), "c has the slot of a"
    pool.begin(entries["a"])
    assert not pool.acquire(entries["a"], at_once=False) and entries["a"].slot is None
    pool.write_all()
    assert not pool.acquire(entries["a"], at_once=False) and entries["c"].slot is None
    assert pool.acquire(entries["a"]), "nobody ran with c"


def test_what_comes_first_is_written_first():
    pool, written, _ = make(2)
    first, second = pool.add("a", adapter()), pool.add("b", adapter())
    assert (first.slot, second.slot) == (0, 1)
    pool.write_part(), pool.write_part()
    assert pool.write_part() and written == [first.adapter, None] and pool.writing
    assert run(pool, second) and written[1] is second.adapter and not pool.writing


@pytest.mark.parametrize("way", ["remove", "clear", "replace"])
def test_what_is_given_up_is_not_written_further(way):
    pool, written, entries = begun(1, "ab")
    pool.end(entries["b"])
    if way == "remove":
        pool.remove("b")
    elif way == "clear":
        pool.clear_slots()
    else:
        new = pool.add("b", adapter())
        assert new.slot == 0
        pool.write_all()
        assert written[0] is new.adapter
    assert not pool.writing and (way == "replace") == bool(pool.resident)


def test_a_successor_that_runs_is_written_at_once():
    pool, written, entries = make(1, "a", switch=True)
    run(pool, entries["a"])
    new = pool.add("a", adapter(2))
    assert not pool.writing and written[0] is new.adapter and new.running == 1


@pytest.mark.parametrize("call", ["update", "pin"])
def test_what_needs_a_slot_now_waits_until_others_are_written(call):
    pool, written, entries = begun(1 if call == "update" else 2, "abc")
    if call == "update":
        assert pool.update("a", params()).slot == 0 and isinstance(written[0], DeviceParams)
    else:
        run(pool, entries["b"])
        assert pool.pin("a").slot == entries["a"].slot is not None
    assert entries["c"].slot is None


def test_a_part_that_fails_takes_the_slot_back():
    def write(slot, adapter):
        yield
        raise OSError("the device is gone")

    pool = AdapterPool([64], write, lambda slot, held: None)
    entry = pool.add("a", adapter())
    pool.write_part()
    with pytest.raises(OSError, match="gone"):
        pool.write_part()
    assert (entry.slot, pool.free, pool.writing) == (None, 1, False)


# ---- slots of several ranks ----------------------------------------------------------------------
def test_an_adapter_takes_the_smallest_slot_that_holds_it():
    pool, _, _ = make((2, 2, 8))
    small = [pool.add(name, adapter(2)) for name in "ab"]
    large = pool.add("c", adapter(8))
    assert [entry.slot for entry in (*small, large)] == [0, 1, 2]
    assert pool.add("d", adapter(1)).slot is None, "nothing is free"
    d = pool.get("d")
    assert run(pool, d) and d.slot == 0, "of its own rank, though c was used before b"
    run(pool, small[1])
    e = pool.add("e", adapter(2))
    assert run(pool, e) and e.slot == 2, "its own rank's are in use"
    assert not run(pool, large), "no other slot holds it"
    stop(pool, small[1])
    assert not pool.acquire(large)
    stop(pool, e)
    assert pool.acquire(large) and large.slot == 2


def test_a_new_version_of_a_larger_rank_moves():
    pool, written, _ = make((2, 8), "a")
    new = pool.add("a", adapter(8))
    assert new.slot == 1 and pool.resident == 1
    assert pool.update("a", params(2)).slot == 0
    assert pool.update("a", params(3)).slot == 1 and isinstance(written[1], DeviceParams)


@pytest.mark.parametrize("kind", ["add", "update"])
def test_a_successor_of_a_larger_rank_moves_with_its_requests(kind):
    pool, _, entries = make((2, 8), "a", switch=True)
    run(pool, entries["a"])
    other = pool.add("b", adapter(8))
    run(pool, other)
    new = {"add": adapter, "update": params}[kind]
    before = list(pool)
    with pytest.raises(AdapterError, match="no slot can be had") as caught:
        getattr(pool, kind)("a", new(8))
    assert caught.value.found == "1 slots that it may have" and list(pool) == before
    stop(pool, other)
    successor = getattr(pool, kind)("a", new(8))
    assert (successor.slot, successor.running) == (1, 1)
    assert entries["a"].slot is None and other.slot is None


def test_an_update_that_is_pinned_does_not_take_the_last_slot():
    pool, written, entries = make((2, 2, 8, 8), "ab")
    pool.add("l", adapter(8))
    pool.pin("a"), pool.pin("l")
    run(pool, entries["a"]), run(pool, entries["b"])
    before = list(pool), list(written)
    with pytest.raises(AdapterError, match="no slot can be had"):
        pool.update("a", params(2))
    assert (list(pool), list(written)) == before
    stop(pool, entries["b"])
    assert pool.update("a", params(2)).slot == 1


def test_one_slot_of_every_rank_is_never_pinned():
    pool, _, entries = make((2, 2, 8, 8), "abc")
    large = pool.add("l", adapter(8))
    pool.pin("a"), pool.pin("b")
    with pytest.raises(AdapterError, match="too many adapters are pinned") as caught:
        pool.pin("l"), pool.pin("c")
    assert caught.value.expected == "at most 1 pinned of 2 slots of rank 8 or more"
    assert entries["c"].slot == 2 and not entries["c"].info.pinned and large.info.pinned
    with pytest.raises(AdapterError, match="larger rank") as caught:
        pool.add("a", adapter(8))
    assert caught.value.key == "a" and "unpin_adapter" in caught.value.hint
    assert pool.get("a") is entries["a"] and entries["a"].slot == 0
    pool.clear_slots()
    pool.place_pinned()
    assert {info.name for info in pool if info.slot is not None} == {"a", "b", "l"}
    assert run(pool, pool.add("m", adapter(8))), "there is a slot for it all the same"


class RanksInAnyOrder(RuleBasedStateMachine):
    """Whatever has happened, everyone gets a slot once the others have ended."""

    RANKS = (1, 2, 2, 4, 4)

    @initialize(switch=st.booleans())
    def begin_with(self, switch):
        self.pool, self.written, _ = make(self.RANKS, switch=switch)
        self.running: list[Entry] = []

    def entries(self) -> list[Entry]:
        return [self.pool.get(info.name) for info in self.pool]

    @rule(name=st.sampled_from("abcdefg"), rank=st.integers(1, 4), on_device=st.booleans())
    def load(self, name, rank, on_device):
        self.pool.write_all()
        before = list(self.pool), list(self.written)
        try:
            new = self.pool.update(name, params(rank)) if on_device else None
            new = new or self.pool.add(name, adapter(rank))
        except AdapterError:
            assert (list(self.pool), list(self.written)) == before
            return
        self.running = [e.successor or e for e in self.running]
        assert new.slot is not None or not on_device

    @precondition(lambda self: list(self.pool))
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data, pinned):
        entry = data.draw(st.sampled_from(self.entries()))
        with contextlib.suppress(AdapterError):
            (self.pool.pin if pinned else self.pool.unpin)(entry.info.name)

    @precondition(lambda self: list(self.pool))
    @rule(data=st.data())
    def start(self, data):
        entry = data.draw(st.sampled_from(self.entries()))
        self.pool.begin(entry)
        if self.pool.acquire(entry, at_once=data.draw(st.booleans())):
            self.running.append(entry)
        else:
            self.pool.end(entry)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        stop(self.pool, self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule()
    def sleep(self):
        while self.running:
            stop(self.pool, self.running.pop())
        self.pool.clear_slots()
        self.pool.place_pinned()

    @invariant()
    def slots_hold_what_is_in_them(self):
        for entry in filter(None, self.pool._slots):
            assert self.RANKS[entry.slot] >= entry.info.rank
            assert self.pool._slots[entry.slot] is entry
        assert all(entry.slot is not None for entry in self.running)

    def teardown(self):
        while getattr(self, "running", None):
            stop(self.pool, self.running.pop())
        for entry in self.entries() if hasattr(self, "pool") else ():
            assert run(self.pool, entry)
            stop(self.pool, entry)


RanksInAnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRanksInAnyOrder = RanksInAnyOrder.TestCase


# ---- names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["", "..", "a/b", None, 3, ["a"]])
def test_bad_names(name):
    pool, _, _ = make(1, "a")
    for call in (pool.get, pool.remove, pool.pin, pool.unpin):
        with pytest.raises(AdapterError, match="cannot name an adapter"):
            call(name)


def test_unknown_names_are_told_a_few_that_are_known():
    pool, _, _ = make(1)
    with pytest.raises(AdapterError) as caught:
        pool.get("x")
    assert caught.value.expected == "one of none"
    for i in range(1000):
        pool.add(f"a{i}", adapter())
    for call in (pool.get, pool.remove, pool.pin, pool.unpin):
        with pytest.raises(AdapterError, match="no adapter of this name") as caught:
            call("x")
        assert "'a0'" in caught.value.expected and "and 992 more" in caught.value.expected


# ---- anything in any order -----------------------------------------------------------------------
NAMES = st.sampled_from("abcdef")


class AnyOrder(RuleBasedStateMachine):
    """Everything the engine may do to a pool of three slots."""

    def __init__(self):
        super().__init__()
        self.pool, self.written, _ = make(3)
        self.current: dict[str, Entry] = {}
        self.versions: dict[str, int] = {}
        self.every: list[Entry] = []
        self.waiting: list[Entry] = []
        self.running: list[Entry] = []
        self.kept: dict[Entry, int] = {}  # slots that may not be taken away

    def begun(self, entry: Entry) -> bool:
        return entry in self.waiting or entry in self.running

    @rule(name=NAMES, rank=st.integers(1, 3))
    def load(self, name, rank):
        pinned = name in self.current and self.current[name].info.pinned
        entry = self.pool.add(name, adapter(rank))
        self.versions[name] = self.versions.get(name, 0) + 1
        info = entry.info
        assert (info.name, info.version, info.rank) == (name, self.versions[name], rank)
        assert info.pinned == pinned
        self.current[name] = entry
        self.every.append(entry)

    @rule(name=NAMES, rank=st.integers(1, 3))
    def update(self, name, rank):
        old, before = self.current.get(name), list(self.pool)
        pinned = old is not None and old.info.pinned
        held = {e for e in self.held() if e is not old or e in self.running}
        if len(held) == 3:
            with pytest.raises(AdapterError, match="no slot can be had"):
                self.pool.update(name, params(rank))
            assert list(self.pool) == before
            return
        entry = self.pool.update(name, params(rank))
        self.versions[name] = self.versions.get(name, 0) + 1
        info = entry.info
        assert (info.version, info.rank, info.nbytes) == (self.versions[name], rank, 0)
        assert info.pinned == pinned and info.slot is not None
        self.current[name] = entry
        self.every.append(entry)

    @rule(name=NAMES, when_busy=st.sampled_from(["refuse", "finish"]))
    def unload(self, name, when_busy):
        entry = self.current.get(name)
        if entry is None or (when_busy == "refuse" and self.begun(entry)):
            with pytest.raises(AdapterError):
                self.pool.remove(name, when_busy)
        else:
            self.pool.remove(name, when_busy)
            del self.current[name]

    @rule(name=NAMES)
    def pin(self, name):
        entry = self.current.get(name)
        others = [e for e in self.current.values() if e.info.pinned and e is not entry]
        held = self.held()
        if entry is None or len(others) == 2 or (entry.slot is None and len(held) == 3):
            before = list(self.pool)
            with pytest.raises(AdapterError):
                self.pool.pin(name)
            assert list(self.pool) == before
        else:
            info = self.pool.pin(name)
            assert info.pinned and info.slot is not None

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def unpin(self, data):
        name = data.draw(st.sampled_from(sorted(self.current)))
        assert not self.pool.unpin(name).pinned
        self.forget_what_is_no_longer_kept()

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def begin(self, data):
        entry = self.pool.get(data.draw(st.sampled_from(sorted(self.current))))
        self.pool.begin(entry)
        self.waiting.append(entry)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def acquire(self, data):
        entry = self.waiting[data.draw(st.integers(0, len(self.waiting) - 1))]
        at_once = data.draw(st.booleans())
        parts = set() if at_once else self.in_parts()  # all is written before
        taken = self.held() | parts
        has_slot = entry.slot is not None or len(taken) < 3
        expected = has_slot and (at_once or (entry.slot is not None and entry not in parts))
        idle = [e for e in self.every if e.slot is not None and e not in taken and e is not entry]
        oldest = min(idle, key=lambda e: e.last_used, default=None)
        evicts = entry.slot is None and self.pool.free == 0 and has_slot
        assert self.pool.acquire(entry, at_once=at_once) == expected
        assert (entry.slot is not None) == has_slot
        if expected:
            self.waiting.remove(entry)
            self.running.append(entry)
        for other in idle:
            assert (other.slot is None) == (evicts and other is oldest)

    @precondition(lambda self: self.pool.writing)
    @rule()
    def write_part(self):
        before = self.in_parts()
        done = self.pool.write_part()
        assert len(before - self.in_parts()) == done

    def in_parts(self) -> set[Entry]:
        """Those whose slots are not written to the end."""
        return {e for e in self.every if e.slot is not None and e in self.pool._writing}

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        entry = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        stop(self.pool, entry)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_waiting(self, data):
        entry = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.pool.end(entry)

    def held(self) -> set[Entry]:
        """Those with a slot that is not to be had."""
        pinned = {e for e in self.current.values() if e.info.pinned and e.slot is not None}
        return pinned | set(self.running)

    def forget_what_is_no_longer_kept(self):
        held = self.held()
        self.kept = {entry: slot for entry, slot in self.kept.items() if entry in held}

    @invariant()
    def slots_add_up(self):
        resident = [entry for entry in self.every if entry.slot is not None]
        assert len({entry.slot for entry in resident}) == len(resident) == self.pool.resident
        assert self.pool.free + self.pool.resident == 3
        for entry in resident:
            content = self.written[entry.slot]
            if isinstance(content, DeviceParams):
                content = content.in_slot
            assert content is entry.adapter or entry in self.in_parts()
        assert not self.in_parts() & set(self.running)
        assert set(self.pool._writing) == self.in_parts()

    @invariant()
    def what_is_nowhere_else_keeps_its_slot(self):
        for entry in self.every:
            assert not isinstance(entry.adapter, InSlot) or entry.slot is not None

    @invariant()
    def what_is_held_keeps_its_slot(self):
        self.forget_what_is_no_longer_kept()
        for entry, slot in self.kept.items():
            assert entry.slot == slot
        self.kept = {entry: entry.slot for entry in self.held()}
        assert None not in self.kept.values()
        assert sum(info.pinned for info in self.pool) < 3

    @invariant()
    def only_what_may_be_needed_is_kept(self):
        needed = [e for e in self.every if self.current.get(e.info.name) is e or self.begun(e)]
        for entry in self.every:
            assert (entry.adapter is not None) == (entry in needed)
            assert entry.requests == (self.waiting + self.running).count(entry)
            assert entry.running == self.running.count(entry)
        assert self.pool.host_bytes == sum(entry.adapter.nbytes for entry in needed)
        names = {info.name: info for info in self.pool}
        assert names == {name: entry.info for name, entry in self.current.items()}
        assert all(info.version == self.versions[name] for name, info in names.items())


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAnyOrder = AnyOrder.TestCase
