"""Any number of adapters over a fixed number of slots: who has one, and who makes room.

The unit is one version of an adapter, an `Entry`. Loading under a taken name makes a new version;
requests keep the one that they began with. So an entry's host copy lives while its name stands for
it or an unfinished request holds it, and its slot cannot be taken while a request runs with it.
Otherwise a slot is only a cache: the least recently used entry gives up its own to one that needs
it, and comes back from the host copy. That is written in parts, between which others go on: the
entry has its slot, which nobody takes then, and its requests wait for the last part. One slot of
every rank, or a larger one, is never pinned, so that every adapter has a turn.

Slots may be of several ranks. An adapter takes the smallest that is free and holds its rank, or one
of the smallest rank where none is.

In a pool that switches, a new version is the old one's successor instead: it takes its slot, if it
has one, and its requests, and nothing is left of the old one.

A version that came from the device is in its slot alone, and gets a host copy when it gives up the
slot.

A name may have a trainer, any object: then nobody else makes versions of it or removes it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lora_moe_jax.adapters.adapter import Adapter
from lora_moe_jax.adapters.device_params import DeviceParams, InSlot
from lora_moe_jax.adapters.entry import AdapterInfo, Entry
from lora_moe_jax.adapters.names import check_name
from lora_moe_jax.errors import AdapterBusyError, AdapterError

WHEN_BUSY = ("refuse", "finish")
_NAMES_SHOWN = 8  # in messages: there may be thousands


class AdapterPool:
    """The adapters of an engine and its slots. Nothing in it touches a device.

    A request calls `begin`, then `acquire` until that is true, then `release`, then `end`; or
    `begin` and `end` alone if it never ran.

    Args:
      ranks: the largest rank that fits into each slot of the bank, in ascending order.
      write: puts an adapter into a slot, a part with each step of the iterator; it is given only
        what fits, and must not fail.
      read: makes the host copy of what came from the device and is in a slot.
      switch: whether a new version is the successor of the one before; the requests are to be told.

    Attributes:
      loads: how many times a slot was written.
      evictions: how many times an adapter lost its slot to another.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        write: Callable[[int, Adapter | DeviceParams], Iterator[None]],
        read: Callable[[int, InSlot], Adapter],
        *,
        switch: bool = False,
    ):
        self.loads = self.evictions = 0
        self._write = write
        self._read = read
        self._switch = switch
        self._ranks = tuple(ranks)
        self._slots: list[Entry | None] = [None] * len(ranks)
        self._writing: dict[Entry, Iterator[None]] = {}  # the rest of what goes into its slot
        self._entries: dict[str, Entry] = {}
        self._retired: set[Entry] = set()  # replaced or unloaded; unfinished requests hold them
        self._versions: dict[str, int] = {}  # goes on counting after a name was unloaded
        # Weak: an adapter whose trainer is gone is as any other.
        self._trainers: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        self._clock = itertools.count(1)

    def __iter__(self) -> Iterator[AdapterInfo]:
        return (entry.info for entry in self._entries.values())

    @property
    def resident(self) -> int:
        """Slots that are taken, by old versions too."""
        return sum(entry is not None for entry in self._slots)

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return len(self._slots) - self.resident

    @property
    def host_bytes(self) -> int:
        """Bytes of all host copies in memory, those of old versions in use included."""
        return self._bytes_of_copies(on_disk=False)

    @property
    def disk_bytes(self) -> int:
        """The same of those on disk."""
        return self._bytes_of_copies(on_disk=True)

    def _bytes_of_copies(self, on_disk: bool) -> int:
        entries = itertools.chain(self._entries.values(), self._retired)
        return sum(entry.info.nbytes for entry in entries if entry.info.on_disk == on_disk)

    # Names

    def get(self, name: str) -> Entry:
        """The newest version. Raises AdapterError for a name that is not loaded."""
        check_name(name)
        if name not in self._entries:
            raise AdapterError(
                "no adapter of this name is loaded",
                key=name,
                expected=f"one of {_shown(self._entries)}",
                found=name,
                hint="load it with load_adapter",
            )
        return self._entries[name]

    def add(self, name: str, adapter: Adapter) -> Entry:
        """Makes `adapter`, which fits the bank, the newest version under a good name.

        It gets a slot at once if it has that of the version before, or one is free; it is in it
        when requests run with it, else after `write_all`. A pin stays with the name; for that an
        idle adapter makes room, and if none is idle the new version gets its slot when first used.

        Raises:
          AdapterError: its rank is too large for the slot of the version before, whose pin or whose
            running requests need another, and none can be had. Nothing has changed then.
        """
        old = self._entries.get(name)
        self._check_pin(name, adapter.rank)
        runs = self._switch and old is not None and old.running
        if runs and not self._holds(old.slot, adapter.rank):
            self.write_all()
            self._check_obtainable(name, adapter.rank)
        entry = self._new_version(name, adapter)
        free = None in map(self._slots.__getitem__, self._fitting(entry, entry.info.rank))
        if entry.slot is not None or free or entry.info.pinned or entry.running:
            self._place(entry)
        if entry.running:
            self._write_rest(entry)
        return entry

    def check_trainer(self, name: str, trainer: object | None = None) -> None:
        """Raises AdapterError if the name has another trainer than this one."""
        if self._trainers.get(name, trainer) is not trainer:
            raise AdapterError(
                "the adapter is in training: only its trainer can replace it, and nobody unload it",
                key=name,
                expected="an adapter that is not in training",
                found=f"one that a {type(self._trainers.get(name)).__name__} has",
                hint="Trainer.remove_adapter it first, or choose another name",
            )

    def end_training(self, name: str) -> None:
        """The name has no trainer any more, if it had one."""
        self._trainers.pop(name, None)

    def update(self, name: str, params: DeviceParams, trainer: object | None = None) -> Entry:
        """Makes parameters, which fit the bank, the newest version under a good name.

        They are written at once and not kept. The version before keeps its slot only if a request
        runs with it; in a pool that switches it has none any more.

        Args:
          trainer: of the name from now on, if it is not None.

        Raises:
          AdapterError: no slot can be had. Nothing has changed then.
          Exception: what the device says if writing fails. Then the name stands for nothing.
        """
        old, rank = self._entries.get(name), params.in_slot.rank
        self._check_pin(name, rank)
        in_place = self._switch and old is not None and self._holds(old.slot, rank)
        if not in_place:
            self.write_all()
            self._check_obtainable(name, rank)
        entry = self._new_version(name, params.in_slot)
        try:
            self._place(entry, params)
            self._write_rest(entry)
        except BaseException:
            self._vacate(entry)
            self._retire(self._entries.pop(name))
            raise
        if trainer is not None:
            self._trainers[name] = trainer
        return entry

    def _check_pin(self, name: str, rank: int) -> None:
        """Raises AdapterError if a new version of this rank cannot keep the pin of its name."""
        old = self._entries.get(name)
        if old is None or not old.info.pinned or self._holds(old.slot, rank):
            return
        if not self._leaves_room(self._smallest(rank), old):
            raise AdapterError(
                "the new version of a pinned adapter needs a slot of a larger rank, and the last "
                "of these must stay for adapters that are not pinned",
                key=name,
                expected=f"at most rank {self._held_rank(old)}",
                found=f"rank {rank}",
                hint="unpin_adapter it or another first, or build the engine with more such slots",
            )

    def _check_obtainable(self, name: str, rank: int) -> None:
        """Raises AdapterError if no slot can be had at once for a new version."""
        old = self._entries.get(name)
        fitting = [self._slots[slot] for slot in self._fitting(old, rank)]
        if all(e and (e.running or (e.info.pinned and e is not old)) for e in fitting):
            raise AdapterError(
                "no slot can be had for a new version: each is pinned or in use by a running "
                "request",
                key=name,
                expected="a slot whose adapter is neither",
                found=f"{len(fitting)} slots that it may have",
                hint="finish or abort streams first, unpin_adapter one, or build the engine with a "
                "larger max_adapters: one slot more than adapters that run at a time, or, with "
                'update_policy="switch", as many',
            )

    def _new_version(self, name: str, adapter: Adapter | InSlot) -> Entry:
        version = self._versions[name] = self._versions.get(name, 0) + 1
        info = AdapterInfo(
            name=name,
            version=version,
            slot=None,
            rank=adapter.rank,
            layout=adapter.layout,
            targets=adapter.targets,
            nbytes=adapter.nbytes,
            on_disk=adapter.on_disk,
        )
        entry, old = Entry(info, adapter), self._entries.get(name)
        if old is not None:
            entry.info = replace(info, pinned=old.info.pinned)
            if self._switch:
                self._take_over(old, entry)
            self._retire(old)
        self._entries[name] = entry
        return entry

    def _take_over(self, old: Entry, entry: Entry) -> None:
        """Makes `entry`, which is to be written then, the successor of another."""
        old.successor = entry
        entry.requests, entry.running, old.requests, old.running = old.requests, old.running, 0, 0
        slot = old.slot
        self._vacate(old)
        if self._holds(slot, entry.info.rank):
            self._slots[slot] = entry
            entry.info = replace(entry.info, slot=slot)

    def remove(self, name: str, when_busy: str = "refuse") -> None:
        """Forgets a name; what it stood for goes with the last request that holds it.

        Args:
          when_busy: "refuse" raises AdapterError if there are such requests, "finish" does not.

        Raises:
          AdapterError: also if it is not loaded, or has a trainer.
        """
        if when_busy not in WHEN_BUSY:
            raise AdapterError(
                "this is not a way to unload an adapter",
                key="when_busy",
                expected=f"one of {WHEN_BUSY}",
                found=repr(when_busy)[:200],
            )
        entry = self.get(name)
        self.check_trainer(name)
        if entry.requests and when_busy == "refuse":
            raise AdapterBusyError(
                "the adapter is in use",
                key=name,
                expected="no unfinished request that uses it",
                found=f"{entry.requests} unfinished request(s)",
                hint='finish or close their streams first, or unload it with when_busy="finish"',
            )
        self._retire(self._entries.pop(name))

    def pin(self, name: str) -> AdapterInfo:
        """Gives the adapter a slot, if it has none, that nobody takes from it, as `add` does.

        Raises:
          AdapterError: no slot can be had, or every other slot of its rank but one is pinned.
        """
        entry = self.get(name)
        pinned = [info.name for info in self if info.pinned and info.name != name]
        rank = self._held_rank(entry)
        if not self._leaves_room(rank, entry):
            slots = sum(its >= rank for its in self._ranks)
            raise AdapterError(
                "too many adapters are pinned: one slot must stay for those that are not",
                key=name,
                expected=f"at most {slots - 1} pinned of {slots} slots of rank {rank} or more",
                found=f"{len(pinned) + 1} with this one",
                hint=f"unpin_adapter one of {_shown(pinned)}, "
                "or build the engine with a larger max_adapters",
            )
        self.write_all()
        before, entry.info = entry.info, replace(entry.info, pinned=True)
        if entry.slot is None and not self._place(entry):
            entry.info = before
            raise AdapterError(
                "no slot can be had: each is pinned or in use by a running request",
                key=name,
                expected="a slot whose adapter is neither",
                found=f"{len(self._slots)} slots, {len(pinned)} of them pinned",
                hint=f"finish or close streams first, unpin_adapter one of {_shown(pinned)}, "
                "or build the engine with a larger max_adapters",
            )
        return entry.info

    def unpin(self, name: str) -> AdapterInfo:
        """Lets others take the adapter's slot. Raises AdapterError for an unknown name."""
        entry = self.get(name)
        entry.info = replace(entry.info, pinned=False)
        return entry.info

    # Requests

    def begin(self, entry: Entry) -> None:
        """A request comes that will use this version."""
        entry.requests += 1

    def acquire(self, entry: Entry, *, at_once: bool = True) -> bool:
        """The request is to run: whether the entry is in a slot, which it then keeps.

        Args:
          at_once: write all that there is to write. Otherwise the entry may have a slot, and be in
            it only after some `write_part`.
        """
        if at_once:
            self.write_all()
        if entry.slot is None and not self._place(entry):
            return False
        if at_once:
            self._write_rest(entry)
        if entry in self._writing:
            return False
        entry.running += 1
        entry.last_used = next(self._clock)
        return True

    def release(self, entry: Entry) -> None:
        """The request runs no more."""
        entry.running -= 1
        entry.last_used = next(self._clock)

    def end(self, entry: Entry) -> None:
        """The request is gone, and with the last one a version that nobody can ask for again."""
        entry.requests -= 1
        if entry in self._retired and not entry.requests:
            self._retired.remove(entry)
            self._drop(entry)

    # Slots

    @property
    def writing(self) -> bool:
        """Whether there is something to write."""
        return bool(self._writing)

    def write_part(self) -> bool:
        """Writes a part of what came first; whether an entry is in its slot now."""
        return self._write_part(next(iter(self._writing)))

    def write_all(self) -> None:
        """Writes all that there is to write."""
        for entry in list(self._writing):
            self._write_rest(entry)

    def _write_rest(self, entry: Entry) -> None:
        while entry in self._writing:
            self._write_part(entry)

    def _write_part(self, entry: Entry) -> bool:
        try:
            done = next(self._writing[entry], self) is self
        except BaseException:
            self._vacate(entry)
            raise
        if done:
            del self._writing[entry]
        return done

    def place_all(self, names: Sequence[str]) -> list[int]:
        """Gives all of these adapters slots, which they keep until the pool is asked for more.

        Raises:
          AdapterError: one is not loaded, or finds no slot beside the others.
        """
        entries, held = [self.get(name) for name in names], []
        try:
            for entry in entries:
                if not self.acquire(entry):
                    raise AdapterError(
                        "no slot can be had for an adapter: each is pinned, in use by a running "
                        "request, or another's of the same batch",
                        key=entry.info.name,
                        expected=f"at most {len(self._slots)} adapters at a time",
                        found=f"{len(names)} in the batch",
                        hint="use smaller batches, or build the engine with a larger max_adapters",
                    )
                held.append(entry)
            return [entry.slot for entry in held]
        finally:
            for entry in held:
                self.release(entry)

    def clear_slots(self) -> None:
        """Every entry gives up its slot; no request is running."""
        for entry in filter(None, list(self._slots)):
            self._make_room(entry)

    def place_pinned(self) -> None:
        """Gives pinned adapters slots again, after `clear_slots`."""
        for entry in self._entries.values():
            if entry.info.pinned:
                self._place(entry)

    def _place(self, entry: Entry, params: DeviceParams | None = None) -> bool:
        """Begins to write the entry to its slot, or to one that is free or that an idle entry gives
        up, if any.

        Args:
          params: its values, if there is no host copy.
        """
        slot = self._slot_for(entry) if entry.slot is None else entry.slot
        if slot is None:
            return False
        if self._slots[slot] not in (None, entry):
            self._make_room(self._slots[slot])
            self.evictions += 1
        self._writing[entry] = self._write(slot, entry.adapter if params is None else params)
        self.loads += 1
        self._slots[slot] = entry
        entry.info = replace(entry.info, slot=slot)
        entry.last_used = next(self._clock)
        return True

    def _slot_for(self, entry: Entry) -> int | None:
        """A free slot, else that of the entry not used for longest among the idle ones, if any; of
        the smallest rank."""
        fitting = self._fitting(entry, entry.info.rank)
        free = [slot for slot in fitting if self._slots[slot] is None]
        if free:
            return free[0]
        idle = [
            slot
            for slot in fitting
            if not (self._slots[slot].running or self._slots[slot].info.pinned)
            and self._slots[slot] not in self._writing
        ]
        order = [(self._ranks[slot], self._slots[slot].last_used, slot) for slot in idle]
        return min(order)[-1] if order else None

    def _fitting(self, entry: Entry | None, rank: int) -> list[int]:
        """Slots that an entry, or a version of this rank after it, may have, the smallest first."""
        pinned = entry is not None and entry.info.pinned
        return [
            slot
            for slot, its in enumerate(self._ranks)
            if its >= rank and (not pinned or self._leaves_room(its, entry))
        ]

    def _holds(self, slot: int | None, rank: int) -> bool:
        return slot is not None and self._ranks[slot] >= rank

    def _smallest(self, rank: int) -> int:
        """The rank of the smallest slots that hold this rank."""
        return min(its for its in self._ranks if its >= rank)

    def _held_rank(self, entry: Entry) -> int:
        """The rank of the slot that the entry has, or of the smallest that it may have."""
        return self._smallest(entry.info.rank) if entry.slot is None else self._ranks[entry.slot]

    def _leaves_room(self, rank: int, entry: Entry) -> bool:
        """Whether the entry may be pinned in a slot of this rank: of every rank, one slot that
        holds it has to stay for adapters that are not."""
        others = [e for e in self._entries.values() if e.info.pinned and e is not entry]
        held = [rank, *map(self._held_rank, others)]
        return all(
            sum(its >= least for its in held) < sum(its >= least for its in self._ranks)
            for least in set(self._ranks)
        )

    def _make_room(self, entry: Entry) -> None:
        """The entry gives up its slot, and will be needed again."""
        if isinstance(entry.adapter, InSlot):
            entry.adapter = self._read(entry.slot, entry.adapter)
            entry.info = replace(entry.info, nbytes=entry.adapter.nbytes)
        self._vacate(entry)

    def _vacate(self, entry: Entry) -> None:
        self._writing.pop(entry, None)
        if entry.slot is not None:
            self._slots[entry.slot] = None
            entry.info = replace(entry.info, slot=None)

    def _retire(self, entry: Entry) -> None:
        """The entry's name no longer stands for it."""
        entry.info = replace(entry.info, pinned=False)
        if entry.requests:
            self._retired.add(entry)
        else:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._vacate(entry)
        entry.adapter = None


def _shown(names) -> str:
    """A few of the names, for a message."""
    names = sorted(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{names[:_NAMES_SHOWN]}{more}" if names else "none"
