"""A pack's slots: copies of those that its adapters have, each numbered as its tokens say."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lora_moe_jax.adapters.bank import Bank
from lora_moe_jax.training.pack_slots import copy_counts, pack_slots
from lora_moe_jax.training.packing import Pack, PackSizes, smallest
from tests.adapters.test_slot_writer import SLOTS, bank
from tests.training.helpers import add, data, gradients, same, scores

RANKS = 2, 4, 8
BANKS = [bank("float32", False, RANKS[:count]) for count in (1, 2, 3)]


@st.composite
def adapters(draw) -> tuple[Bank, dict[str, int]]:
    its = draw(st.sampled_from(BANKS))
    slots = draw(st.lists(st.integers(0, its.slots - 1), min_size=1, max_size=4, unique=True))
    return its, {str(number): slot for number, slot in enumerate(slots)}


@given(adapters(), st.integers(4, 6))
def test_every_adapter_finds_its_own_slot(case, most):
    its, slots = case
    found = pack_slots(its, slots, most)
    assert {rank: len(chosen) for rank, chosen in found.chosen.items()} == dict.fromkeys(
        its.classes, min(most, SLOTS)
    )
    every = [(rank, place) for rank, chosen in found.chosen.items() for place in chosen]
    for name, slot in slots.items():
        rank, number = found.places[name]
        assert (rank, found.chosen[rank][number]) == its.locate(slot)
        assert every[found.numbers[name]] == its.locate(slot)
    assert len(set(found.numbers.values())) == len(slots)


def test_a_pack_has_the_fewest_copies_that_hold_it():
    found = {slots: copy_counts(slots) for slots in (1, 4, 7, 8, 31, 32)}
    assert found == {1: [1], 4: [4], 7: [7], 8: [2, 8], 31: [2, 31], 32: [2, 8, 32]}
    sizes = [PackSizes(tokens, 16, count) for tokens in (32, 64) for count in copy_counts(12)]
    packs = [Pack({str(i): [] for i in range(count)}) for count in range(1, 13)]
    assert [smallest(pack, sizes).slots for pack in packs] == [2, 2, *[12] * 10]
    assert {smallest(pack, sizes).tokens for pack in packs} == {32}


def test_what_no_adapter_needs_is_a_slot_of_the_bank():
    found = pack_slots(BANKS[1], {"a": 5}, 2)
    np.testing.assert_array_equal(found.chosen[2], [0, 0])
    np.testing.assert_array_equal(found.chosen[4], [2, 0])
    assert found.numbers == {"a": 2}


# Those in a pack with another, then in one without it, and how many copies packs have had.
@pytest.mark.slow
@pytest.mark.parametrize("names, later, copies", [("0", "41", {2}), ("0124", "410", {2, 8})])
def test_a_pack_of_few_slots_of_many(small_pair, names, later, copies):
    """An adapter's bits are those of serving, alone and among more adapters than fit into the few
    copies. Nothing compiles for another mix once there are functions for as many copies."""
    engine, trainer = small_pair
    for number in range(5):
        add(trainer, engine, str(number), seed=number)
    own = data([("3", 12), ("3", 9)])
    alone = trainer.forward_backward(own)
    assert same(scores(engine, own), alone.logprobs)
    bits = gradients(trainer, "3")
    others = data([(name, 5) for name in names], seed=1)
    mixed = trainer.forward_backward([*others[:1], *own, *others[1:]])
    assert same(mixed.logprobs[1:3], alone.logprobs)
    assert same(gradients(trainer, "3"), bits) and any(part.any() for part in bits)
    assert {sizes.slots for sizes in trainer._pass._programs} >= copies
    for name in names:
        gradients(trainer, name)
    compilations = engine.stats().compilations
    trainer.forward_backward(data([(name, 6) for name in later], seed=2))
    trainer.forward_backward(data([("2", 13)], seed=3))
    assert engine.stats().compilations == compilations
    for info in trainer.adapters():
        trainer.remove_adapter(info.name)
        engine.unload_adapter(info.name)
