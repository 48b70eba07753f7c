"""Nothing of one slot reaches a row or a gradient of another, not even NaN or Inf."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.cases import Part, Shape, jitted_with_gradients, make_case

SHAPE = Shape(
    rows=75,
    groups=3,
    k=17,
    parts=(
        Part(16),
        Part(2, shared_a=True, shared_scaling=True),
        Part(5, adapted=False),
        Part(17, shared_b=True),
    ),
    rank=2,
)
GROUP_SIZES = (40, 0, 25)  # group 1 has no rows, the last 10 rows no group


@functools.cache
def random_dy(implementation):
    shape = SHAPE.served_by(implementation)
    dy = np.random.default_rng(5).standard_normal((shape.rows, sum(shape.widths)))
    return dy.astype(jnp.dtype(shape.dtype))


def run(case, implementation, dy=None):
    """y, dx and the gradients of every part, in NumPy."""
    dy = random_dy(implementation) if dy is None else dy
    widths = SHAPE.served_by(implementation).widths
    return jax.tree.map(np.asarray, jitted_with_gradients(widths, implementation)(case, dy))


@functools.cache
def clean(slots: tuple[int, ...], implementation: str):
    case = make_case(SHAPE.served_by(implementation), GROUP_SIZES, np.resize(slots, 75))
    return case, run(case, implementation)


ALL_SLOTS = (-1, 0, 1, 2, 3, 0, -1)


def poison(case, field, slot, groups, value):
    """Every pair's `field` of the slot, in the given groups if it has groups."""

    def poisoned(pair):
        if pair is None:
            return None
        array = np.array(getattr(pair, field))
        array[slot, groups if array.shape[1] > 1 else slice(None)] = value
        return pair._replace(**{field: array})

    return case._replace(lora=tuple(poisoned(pair) for pair in case.lora))


def assert_other_slots_equal(found, expected, case, slot):
    rows = case.row_slots != slot
    for value, reference in zip(found[:2], expected[:2], strict=True):
        assert np.array_equal(value[rows], reference[rows])
    others = np.arange(SHAPE.slots) != slot
    for value, reference in zip(*map(jax.tree.leaves, (found[2], expected[2])), strict=True):
        assert np.array_equal(value[others], reference[others])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["a", "b", "scaling"])
@pytest.mark.parametrize("slot", [0, 2])
def test_a_poisoned_adapter_stays_in_its_slot(slot, field, value, implementation):
    case, expected = clean(ALL_SLOTS, implementation)
    found = run(poison(case, field, slot, slice(None), value), implementation)
    assert_other_slots_equal(found, expected, case, slot)
    rows = (case.row_slots == slot) & (np.arange(75) < sum(GROUP_SIZES))
    assert not np.isfinite(found[0][rows]).all(axis=1).any()  # it was poison


@pytest.mark.parametrize("field", ["a", "b", "scaling"])
def test_a_poisoned_group_without_rows_reaches_nothing(field, implementation):
    """Only parts with one factor for each group: a shared factor is every group's."""
    case, expected = clean(ALL_SLOTS, implementation)
    poisoned = poison(case, field, 2, 1, np.nan).lora[0]
    found = run(case._replace(lora=(poisoned, *case.lora[1:])), implementation)
    for value, reference in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.array_equal(value, reference)


@pytest.mark.parametrize("slots", [(-1,), (1, 2, 3), (-1, 3)], ids=str)
@pytest.mark.parametrize("field", ["a", "b", "scaling"])
def test_a_poisoned_slot_without_rows_reaches_nothing(field, slots, implementation):
    case, expected = clean(slots, implementation)
    found = run(poison(case, field, 0, slice(None), np.nan), implementation)
    for value, reference in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.array_equal(value, reference)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_poisoned_rows_stay_in_their_slot(value, implementation):
    """What a broken adapter makes of its rows, in x and in dy."""
    case, expected = clean(ALL_SLOTS, implementation)
    rows = case.row_slots == 2
    x, dy = np.array(case.x), random_dy(implementation).copy()
    x[rows] = value
    dy[rows] = value
    assert_other_slots_equal(run(case._replace(x=x), implementation, dy), expected, case, 2)


def test_poisoned_rows_past_the_last_group_reach_nothing(implementation):
    """They have slots, as rows of experts on other devices do."""
    case, expected = clean(ALL_SLOTS, implementation)
    x, dy = np.array(case.x), random_dy(implementation).copy()
    x[sum(GROUP_SIZES) :] = np.nan
    dy[sum(GROUP_SIZES) :] = np.inf
    found = run(case._replace(x=x), implementation, dy)
    for value, reference in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.array_equal(value, reference)


def test_a_poisoned_base_weight_stays_in_its_group(implementation):
    case, expected = clean(ALL_SLOTS, implementation)
    w = np.array(case.w)
    w[1:] = np.nan
    found = run(case._replace(w=w), implementation)
    for value, reference in zip(found[:2], expected[:2], strict=True):
        assert np.array_equal(value[:40], reference[:40])
        assert np.isnan(value[40:65]).all() and not value[65:].any()


def test_gradients_are_the_same_every_time(implementation):
    case, expected = clean(ALL_SLOTS, implementation)
    for value, reference in zip(
        *map(jax.tree.leaves, (run(case, implementation), expected)), strict=True
    ):
        assert np.array_equal(value, reference)


def test_slots_without_rows_get_zero_gradients(implementation):
    _, (_, _, gradients) = clean((-1, 3), implementation)
    for gradient in jax.tree.leaves(gradients):
        assert not gradient[:3].any() and gradient[3].any()
