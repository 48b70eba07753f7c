"""The slots of a pack's adapters, numbered among themselves.

A pack is computed with copies of a few slots, so that a bank of many does not cost it their bytes:
to copy them, and to write gradients for them. How many is static.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lora_moe_jax.adapters.bank import Bank


class PackSlots(NamedTuple):
    """Which slots of the bank are copied, and where each adapter's copy is.

    Attributes:
      chosen: by rank class, int32 [copies], its slots; where no adapter needs a copy, any.
      numbers: of each adapter among all copies, class after class: the slot of its tokens.
      places: of each adapter: its rank class, and its number there.
    """

    chosen: dict[int, np.ndarray]
    numbers: dict[str, int]
    places: dict[str, tuple[int, int]]


def copy_counts(slots: int) -> list[int]:
    """Of the slots of a bank, ascending: 2, 8, 32, ... as far as all are many more, and all.

    Few, as functions are compiled for each that is in use.
    """
    counts = [2]
    while 4 * counts[-1] <= slots:
        counts.append(4 * counts[-1])
    return [*counts[:-1], slots]


def pack_slots(bank: Bank, slots: Mapping[str, int], most: int) -> PackSlots:
    """Of adapters in these slots of the bank; up to `most` copies of each class.

    There are as many copies as that, of any slots where there are not so many adapters.
    """
    copies = {rank: min(most, its.slots) for rank, its in bank.classes.items()}
    used: dict[int, list[int]] = {rank: [] for rank in copies}
    places = {}
    for name, slot in slots.items():
        rank, place = bank.locate(slot)
        places[name] = rank, len(used[rank])
        used[rank].append(place)
    chosen, starts, total = {}, {}, 0
    for rank, count in copies.items():
        chosen[rank] = np.int32(used[rank] + [0] * (count - len(used[rank])))
        starts[rank], total = total, total + count
    numbers = {name: starts[rank] + number for name, (rank, number) in places.items()}
    return PackSlots(chosen, numbers, places)
