"""The routing plan against a NumPy sort, and `combine` against a sum in choice order."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import combine, routing_plan

TOKENS, CHOICES, EXPERTS, SLOTS = 23, 3, 7, 3


@functools.cache
def planner(num_groups):
    def plan(experts, slots, first_group, valid):
        return routing_plan(experts, slots, num_groups, first_group=first_group, valid=valid)

    return jax.jit(plan)


def expected_plan(experts, slots, num_groups, first_group, valid):
    group = experts.reshape(-1) - first_group
    outside = (group < 0) | (group >= num_groups) | ~np.repeat(valid, CHOICES)
    group = np.where(outside, num_groups, group)
    row_slots = np.repeat(slots, CHOICES)
    order = np.lexsort((np.arange(group.size), row_slots, group))
    position = np.empty_like(order)
    position[order] = np.arange(group.size)
    return (
        order // CHOICES,
        position.reshape(TOKENS, CHOICES),
        row_slots[order],
        np.bincount(group, minlength=num_groups + 1)[:num_groups],
    )


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_equals_a_sort_by_expert_and_slot(data):
    def ints(low, high, count):
        return np.array(data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    experts = ints(0, data.draw(st.sampled_from([0, 1, EXPERTS - 1])), TOKENS * CHOICES)
    experts = experts.reshape(TOKENS, CHOICES).astype(np.int32)
    slots = ints(-1, SLOTS - 1, TOKENS).astype(np.int32)
    valid = ints(0, 1, TOKENS).astype(bool) | data.draw(st.booleans())
    num_groups, first_group = data.draw(st.sampled_from([(EXPERTS, 0), (3, 0), (3, 2), (3, 4)]))
    plan = planner(num_groups)(experts, slots, first_group, valid)
    expected = expected_plan(experts, slots, num_groups, first_group, valid)
    for name, found, value in zip(plan._fields, plan, expected, strict=True):
        assert found.dtype == np.int32 and np.array_equal(found, value), name


def random_routing(seed=0):
    rng = np.random.default_rng(seed)
    experts = rng.integers(0, EXPERTS, (TOKENS, CHOICES)).astype(np.int32)
    return experts, rng.integers(-1, SLOTS, TOKENS).astype(np.int32)


def test_every_token_is_valid_by_default():
    experts, slots = random_routing()
    plan = routing_plan(experts, slots, EXPERTS)
    assert int(plan.group_sizes.sum()) == TOKENS * CHOICES
    expected = planner(EXPERTS)(experts, slots, 0, np.ones(TOKENS, bool))
    assert all(np.array_equal(a, b) for a, b in zip(plan, expected, strict=True))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_narrow_experts(dtype):
    """Numbers of groups, and of the first one, that their type has no room for."""
    experts, slots = np.array([[3], [0], [127]], dtype), np.zeros(3, np.int32)
    sizes = routing_plan(experts, slots, 300).group_sizes
    assert np.flatnonzero(sizes).tolist() == [0, 3, 127]
    later = routing_plan(experts, slots, 254, first_group=3)
    assert np.flatnonzero(later.group_sizes).tolist() == [0, 124]


def test_buckets_are_contiguous_and_ordered():
    experts, slots = random_routing()
    plan = planner(EXPERTS)(experts, slots, 0, np.ones(TOKENS, bool))
    group = np.repeat(np.arange(EXPERTS), plan.group_sizes)
    keys = group * (SLOTS + 1) + np.asarray(plan.row_slots) + 1
    assert (np.diff(keys) >= 0).all()
    row = np.arange(TOKENS * CHOICES)
    assert np.array_equal(np.sort(np.ravel(plan.position)), row)
    assert np.array_equal(experts.reshape(-1), group[np.ravel(plan.position)])
    assert np.array_equal(np.asarray(plan.token)[np.ravel(plan.position)], row // CHOICES)


def test_a_token_keeps_its_expert_order_among_padding():
    """Padding changes no bucket of the others, only what comes after all of them."""
    experts, slots = random_routing()
    valid = np.arange(TOKENS) < 15
    plan = planner(EXPERTS)(experts, slots, 0, valid)
    short = routing_plan(experts[:15], slots[:15], EXPERTS)
    rows = 15 * CHOICES
    assert np.array_equal(plan.group_sizes, short.group_sizes)
    assert np.array_equal(plan.position[:15], short.position)
    assert np.array_equal(plan.token[:rows], short.token)
    assert np.array_equal(plan.row_slots[:rows], short.row_slots)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_combine_adds_in_choice_order(dtype):
    """Weights are powers of two, so products are exact and only the order of the sum counts."""
    rng = np.random.default_rng(3)
    experts, slots = random_routing()
    plan = jax.tree.map(np.asarray, planner(EXPERTS)(experts, slots, 0, np.ones(TOKENS, bool)))
    spread = 10.0 ** rng.integers(-3, 4, (TOKENS * CHOICES, 1))
    rows = (spread * rng.standard_normal((TOKENS * CHOICES, 40))).astype(jax.numpy.dtype(dtype))
    weights = (2.0 ** rng.integers(-3, 3, (TOKENS, CHOICES))).astype(np.float32)

    def in_order(choices):
        total = np.zeros((TOKENS, 40), np.float32)
        for choice in choices:
            row = rows[plan.position[:, choice]].astype(np.float32)
            total = total + row * weights[:, choice, None]
        return total

    found = np.asarray(jax.jit(combine)(rows, plan.position, weights))
    assert found.dtype == np.float32
    assert np.array_equal(found, in_order([0, 1, 2]))
    if dtype == "float32":
        assert not np.array_equal(found, in_order([2, 1, 0]))  # so the order is visible


def test_combine_gives_the_same_bits_for_any_number_of_tokens():
    rng = np.random.default_rng(4)
    experts, slots = random_routing()
    weights = rng.random((TOKENS, CHOICES)).astype(np.float32)
    values = rng.standard_normal((TOKENS, CHOICES, 33)).astype(np.float32)

    def combined(tokens):
        everyone = np.ones(len(tokens), bool)
        plan = planner(EXPERTS)(experts[tokens], slots[tokens], 0, everyone)
        choice = np.empty(plan.token.shape[0], int)
        choice[np.ravel(plan.position)] = np.tile(np.arange(CHOICES), len(tokens))
        rows = values[np.asarray(tokens)[np.asarray(plan.token)], choice]
        return np.asarray(jax.jit(combine)(rows, plan.position, weights[tokens]))

    everything = combined(np.arange(TOKENS))
    for tokens in ([4], [9, 2], list(range(16))):
        assert np.array_equal(combined(np.array(tokens)), everything[tokens])
