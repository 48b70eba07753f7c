"""Slots written from the device and from the host, without an engine: the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_moe_jax import AdapterError
from lora_moe_jax.adapters import Adapter, AdapterConfig, LoraPair, Projection
from lora_moe_jax.adapters.bank import (
    Bank,
    KvBLora,
    Place,
    RankClass,
    SlotEntry,
)
from lora_moe_jax.adapters.device_params import DeviceParams
from lora_moe_jax.adapters.slot_writer import SlotWriter
from lora_moe_jax.training.config import PairShape
from lora_moe_jax.training.masters import Master, Stacks
from pallas_kernels import Lora

SLOTS, RANK, HEADS, NOPE, V = 3, 4, 2, 3, 5
LINEAR = Projection("model.layers.0.self_attn.o_proj", 6, 7)
EXPERTS = Projection("model.layers.0.mlp.experts.up_proj", 6, 7, groups=3, kind="expert")
SHARED = Projection("model.layers.1.mlp.experts.up_proj", 6, 7, groups=3, kind="expert")
KV_B = Projection("model.layers.0.self_attn.kv_b_proj", 6, HEADS * (NOPE + V))
NEXT = Projection("model.layers.1.self_attn.o_proj", 6, 7)
ALL = (LINEAR, EXPERTS, SHARED, KV_B, NEXT)


def bank(dtype: str, joined: bool, ranks: tuple[int, ...] = (RANK,)) -> Bank:
    """Slots of each rank; LINEAR and NEXT in one array, or each in its own."""
    kinds = {LINEAR.name: "linear", NEXT.name: "linear"} if joined else {}
    return Bank([entries(dtype, rank) for rank in ranks], kinds)


def entries(dtype: str, rank: int) -> dict[str, SlotEntry]:
    """A projection of each kind; SHARED has one A for all experts, NEXT is as LINEAR."""

    def zeros(*shape, of=dtype):
        return jnp.zeros((SLOTS, *shape), of)

    def lora(projection: Projection, a_groups: int, groups: int) -> SlotEntry:
        a = zeros(a_groups, rank, projection.in_features)
        b = zeros(groups, rank, projection.out_features)
        return SlotEntry(projection, Lora(a, b, zeros(groups, of="float32")))

    kv_b = KvBLora(
        zeros(1, rank, KV_B.in_features),
        zeros(HEADS, rank, NOPE),
        zeros(HEADS, rank, V),
        zeros(1, of="float32"),
    )
    return {
        LINEAR.name: lora(LINEAR, 1, 1),
        EXPERTS.name: lora(EXPERTS, 3, 3),
        SHARED.name: lora(SHARED, 1, 3),
        KV_B.name: SlotEntry(KV_B, kv_b),
        NEXT.name: lora(NEXT, 1, 1),
    }


def pair(projection: Projection, rank: int, seed: int, dtype="float32", shared=False) -> LoraPair:
    rng = np.random.default_rng(seed)
    groups = projection.groups
    a_groups = 1 if shared or projection is SHARED else groups

    def numbers(*shape):
        # From the smallest to the largest that bfloat16 has, and what it rounds.
        exponents = rng.integers(-133, 100, shape)
        return (rng.standard_normal(shape) * 2.0**exponents).astype(dtype)

    return LoraPair(
        numbers(a_groups, rank, projection.in_features),
        numbers(groups, rank, projection.out_features),
        rng.standard_normal(groups).astype(np.float32),
        np.full(groups, rank, np.int32),
    )


def bits(bank: Bank) -> list[bytes]:
    arrays = sorted(bank.arrays.items())
    return [np.asarray(array).tobytes() for _, lora in arrays for array in lora]


BANKS = {dtype: (bank(dtype, False), bank(dtype, True)) for dtype in ("float32", "bfloat16")}
WRITERS = {dtype: tuple(map(SlotWriter, both)) for dtype, both in BANKS.items()}


def write_all(parts: Iterator[None]) -> None:
    """Goes on to the last part."""
    for _ in parts:
        continue


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(BANKS)),
    st.dictionaries(st.sampled_from(ALL), st.sampled_from([1, 3, RANK]), min_size=1),
    st.integers(0, SLOTS - 1),
    st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@example("bfloat16", {EXPERTS: 3}, 0, np.float32, True, 0)  # the smallest numbers became zero
@example("bfloat16", {EXPERTS: 3, SHARED: 3, LINEAR: 4}, 1, ml_dtypes.bfloat16, True, 1412083465)
def test_the_device_writes_what_the_host_writes(dtype, ranks, slot, values, shared, seed):
    """And what is read back is what was written; other slots stay as they are."""
    (host, device), (to_host, to_device) = BANKS[dtype], WRITERS[dtype]
    pairs = {p.name: pair(p, rank, seed, values, shared) for p, rank in ranks.items()}
    adapter = Adapter(pairs, "stacked", AdapterConfig(r=RANK))
    write_all(to_host.write(slot, adapter))
    on_device = {
        name: LoraPair(*map(jnp.asarray, (p.a, p.b, p.scaling)), p.ranks)
        for name, p in pairs.items()
    }
    params = DeviceParams.of(on_device, device)
    to_device.check_finite(params)
    write_all(to_device.write(slot, params))
    assert bits(host) == bits(device)
    back = to_device.read(slot, params.in_slot)
    assert {name: p.rank for name, p in back.pairs.items()} == {
        p.name: rank for p, rank in ranks.items()
    }
    write_all(to_device.write((slot + 1) % SLOTS, back))
    write_all(to_host.write((slot + 1) % SLOTS, adapter))
    assert bits(host) == bits(device)


def test_alike_projections_lie_in_one_array():
    apart, together = (its.classes[RANK] for its in BANKS["float32"])
    assert len(apart.stacks) == len(ALL)
    assert together.places[LINEAR.name] == Place(LINEAR.name, 0)
    assert together.places[NEXT.name] == Place(LINEAR.name, 1)
    assert len(together.stacks) == len(ALL) - 1
    joined = together.stacks[LINEAR.name]
    assert joined.a.shape == (2, SLOTS, 1, RANK, 6)
    assert joined.scaling.shape == (2, SLOTS, 1)
    assert (together.slots, together.rank) == (apart.slots, apart.rank) == (SLOTS, RANK)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_slots_of_several_ranks_hold_what_one_of_the_largest_does(joined, on_device):
    whole, small = BANKS["bfloat16"][0], 2
    classes = bank("bfloat16", joined, (RANK, small))
    assert (classes.ranks, classes.max_rank) == ((small,) * SLOTS + (RANK,) * SLOTS, RANK)
    assert classes.nbytes < 2 * bank("bfloat16", joined).nbytes
    writer, pairs = SlotWriter(classes), {p.name: pair(p, small, 3) for p in ALL}
    adapter = Adapter(pairs, "stacked", AdapterConfig(r=small))
    write_all(WRITERS["bfloat16"][0].write(1, adapter))
    params = DeviceParams.of(pairs, classes)
    writer.check_finite(params)
    for slot in (1, SLOTS + 1):  # the second of each rank
        write_all(writer.write(slot, params if on_device else adapter))
        back = writer.read(slot, params.in_slot)
        assert {name: p.rank for name, p in back.pairs.items()} == dict.fromkeys(pairs, small)
    # What is in a slot fits into a larger one, too.
    write_all(writer.write(SLOTS + 2, DeviceParams.of(_slot(classes.classes[small], 1), classes)))
    for name, expected in whole.arrays.items():
        of_small, of_large = classes.arrays[name]
        for one, low, high in zip(expected, of_small, of_large, strict=True):
            ranks = (slice(None), slice(small)) if one.ndim > 2 else ()
            assert np.array_equal(one[1], high[1]) and np.array_equal(one[1], high[2])
            assert np.array_equal(one[1][ranks], low[1])
            assert not np.any(low[0]) and not np.any(high[0])


def _slot(slots: RankClass, slot: int) -> dict[str, Lora | KvBLora]:
    return {name: jax.tree.map(lambda x: x[slot], slots.copy(name)) for name in slots.places}


@pytest.mark.parametrize("dtype", BANKS)
@pytest.mark.parametrize("targets", [(LINEAR, NEXT), (EXPERTS, NEXT, KV_B)])
def test_a_trainers_stacks_are_written_as_adapters_are(dtype, targets):
    """Whole stacks of the bank, parts of some, and zeros where there is nothing."""
    (host, device), (to_host, to_device) = BANKS[dtype], WRITERS[dtype]
    pairs = {p.name: pair(p, 3, seed) for seed, p in enumerate(targets)}
    write_all(to_host.write(1, Adapter(pairs, "stacked", AdapterConfig(r=3))))
    stacks = Stacks(
        {n: PairShape(p.a.shape, p.b.shape, p.ranks, p.scaling) for n, p in pairs.items()}
    )
    masters = stacks.join(lambda name: Master(pairs[name].a, pairs[name].b))
    params = DeviceParams.of_stacks(masters, stacks.scalings(), stacks.places)
    to_device.check_finite(params)
    for _ in range(2):
        write_all(to_device.write(1, params))
        assert bits(host) == bits(device)
        params = params.moved(masters)
    back = to_device.read(1, params.in_slot)
    assert {name: p.rank for name, p in back.pairs.items()} == dict.fromkeys(pairs, 3)


@pytest.mark.parametrize("dtype", BANKS)
def test_a_whole_slot_is_written_as_it_is(dtype):
    one, writer = BANKS[dtype][0], WRITERS[dtype][0]
    pairs = {p.name: pair(p, 3, 5) for p in ALL}
    write_all(writer.write(0, Adapter(pairs, "stacked", AdapterConfig(r=3))))
    slot = jax.tree.map(lambda array: array[0], one.arrays)
    params = DeviceParams.of(slot, one)
    write_all(writer.write(2, params))
    for lora in one.arrays.values():
        for array in lora:
            assert np.array_equal(array[0], array[2])
    assert params.in_slot.rank == RANK


def good() -> dict:
    return {p.name: pair(p, 2, 1) for p in ALL}


def without(field: str, value) -> dict:
    broken = good()
    p = broken[LINEAR.name]
    fields = {"a": p.a, "b": p.b, "scaling": p.scaling, "ranks": p.ranks} | {field: value}
    broken[LINEAR.name] = LoraPair(**fields)
    return broken


DONATED = jnp.ones((1, 2, 6))
DONATED.delete()
BAD = {
    "no mapping": [1, 2],
    "nothing": None,
    "a name without slots": {"model.layers.0.q_proj": pair(LINEAR, 1, 0)},
    "a name that is none": {5: pair(LINEAR, 1, 0)},
    "no pair": {LINEAR.name: np.ones(3)},
    "another form of slot": {LINEAR.name: BANKS["float32"][0].arrays[KV_B.name]},
    "all slots": {LINEAR.name: BANKS["float32"][0].arrays[LINEAR.name]},
    "no array": without("a", [[1.0]]),
    "a deleted array": without("a", DONATED),
    "integers": without("b", np.ones((1, 2, 7), np.int32)),
    "a wrong width": without("a", np.ones((1, 2, 5), np.float32)),
    "ranks that differ": without("b", np.ones((1, 3, 7), np.float32)),
    "no rank": without("b", np.ones((1, 0, 7), np.float32)),
    "too many scalings": without("scaling", np.ones(2, np.float32)),
    "too high a rank": {LINEAR.name: pair(LINEAR, RANK + 1, 0)},
    "many factors for one": {
        SHARED.name: LoraPair(
            np.ones((3, 2, 6), np.float32),
            np.ones((3, 2, 7), np.float32),
            np.ones(3, np.float32),
            np.full(3, 2, np.int32),
        )
    },
}


@pytest.mark.parametrize("params", BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused(params):
    with pytest.raises(AdapterError):
        DeviceParams.of(params, BANKS["float32"][0])


@pytest.mark.parametrize("field", ["a", "b", "scaling"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_is_refused_by_name(field, value):
    params = good()
    array = getattr(params[KV_B.name], field).copy()
    array[..., -1] = value
    p = params[KV_B.name]
    fields = {"a": p.a, "b": p.b, "scaling": p.scaling, "ranks": p.ranks} | {field: array}
    params[KV_B.name] = LoraPair(**fields)
    checked = DeviceParams.of(params, BANKS["float32"][0])
    with pytest.raises(AdapterError, match="not finite") as caught:
        WRITERS["float32"][0].check_finite(checked)
    assert caught.value.key == KV_B.name


@pytest.mark.skipif(jax.device_count() == 1, reason="there is nowhere else")
def test_values_elsewhere_are_sent_over():
    one, writer = BANKS["float32"][0], WRITERS["float32"][0]
    other = jax.devices()[1]
    params = {
        name: LoraPair(*(jax.device_put(x, other) for x in (p.a, p.b, p.scaling)), p.ranks)
        for name, p in good().items()
    }
    write_all(writer.write(1, Adapter(good(), "stacked", AdapterConfig(r=2))))
    expected = bits(one)
    write_all(writer.write(1, DeviceParams.of(params, one)))
    assert bits(one) == expected
