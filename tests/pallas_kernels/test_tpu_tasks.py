"""The tables that the TPU kernels run by, against plain loops."""

from __future__ import annotations

import functools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul.tpu_tasks import (
    row_runs,
    row_tasks,
    rows_of_slots,
    tables,
)

ROWS, BLOCK = 50, 16
TILES = -(-ROWS // BLOCK)


@st.composite
def group_sizes(draw):
    """Of 1 or 6 groups, empty ones among them, with at most ROWS rows in all."""
    groups = draw(st.sampled_from([1, 6]))
    cuts = draw(st.lists(st.integers(0, ROWS), min_size=groups, max_size=groups))
    return np.diff(np.sort(cuts), prepend=0).astype(np.int32)


@functools.cache
def compiled(function, **static):
    return jax.jit(functools.partial(function, **static))


def make_tasks(sizes, empty_groups):
    ends = tables(sizes, np.zeros(ROWS, np.int32), len(sizes)).ends
    run = compiled(row_tasks, rows=ROWS, block_m=BLOCK, empty_groups=empty_groups)
    return jax.tree.map(np.asarray, run(ends))


def expected_tasks(sizes, empty_groups):
    """(tile, group, lo, hi) of each task."""
    starts = np.cumsum([0, *sizes])
    found = []
    for group, (start, end) in enumerate(zip(starts, [*starts[1:], ROWS], strict=True)):
        if start == end and empty_groups and group < len(sizes):
            found.append((min(start // BLOCK, TILES - 1), group, None, None))
        for tile in range(TILES):
            lo, hi = max(start, tile * BLOCK), min(end, (tile + 1) * BLOCK)
            if lo < hi:
                found.append((tile, group, lo - tile * BLOCK, hi - tile * BLOCK))
    return found


@settings(max_examples=40, deadline=None)
@given(group_sizes(), st.booleans())
def test_tasks(sizes, empty_groups):
    tasks = make_tasks(sizes, empty_groups)
    expected = expected_tasks(sizes, empty_groups)
    count, active = tasks.counts
    assert count == len(expected) <= len(tasks.tile)
    for i, (tile, group, lo, hi) in enumerate(expected):
        assert (tasks.tile[i], tasks.group[i]) == (tile, group)
        if lo is None:
            assert tasks.lo[i] == tasks.hi[i]
        else:
            assert (tasks.lo[i], tasks.hi[i]) == (lo, hi)
    groups = [group for _, group, _, _ in expected]
    with_tasks = sorted({group for group in groups if group < len(sizes)})
    assert tasks.active[:active].tolist() == with_tasks
    for i, group in enumerate(groups):
        assert tasks.ordinal[i] == sum(other < group for other in with_tasks)
        first = i == 0 or groups[i - 1] != group
        last = i == len(groups) - 1 or groups[i + 1] != group
        assert tasks.edges[i] == first + 2 * last


@settings(max_examples=40, deadline=None)
@given(group_sizes(), st.booleans())
def test_every_row_is_in_one_task(sizes, empty_groups):
    tasks = make_tasks(sizes, empty_groups)
    owners = np.zeros(TILES * BLOCK, int)
    for i in range(tasks.counts[0]):
        first = tasks.tile[i] * BLOCK
        owners[first + tasks.lo[i] : first + tasks.hi[i]] += 1
    assert (owners[:ROWS] == 1).all() and not owners[ROWS:].any()


def test_equal_groups():
    found = tables(None, np.arange(50, dtype=np.int32), 5)
    assert found.ends.tolist() == [10, 20, 30, 40, 50]
    assert found.row_slots.tolist() == list(range(50))
    assert found.group_of_row.tolist() == [row // 10 for row in range(50)]


def test_rows_of_slots():
    found = tables(np.array([9], np.int32), np.array([-1, 0, 1, 2, 3, 4, 5, 9, 3, 3], np.int32), 1)
    of_two = rows_of_slots(found, 1, [(1, 2), (4, 1)])
    assert of_two.row_slots.tolist() == [-1, -1, 0, 1, -1, 3, -1, -1, -1, -1]
    assert rows_of_slots(found, 3, [(3, 2)]).row_slots.tolist() == [*[-1] * 4, 0, 1, -1, -1, 0, -1]
    assert rows_of_slots(found, 0, [(0, 10)]).row_slots.tolist() == found.row_slots.tolist()


@settings(max_examples=40, deadline=None)
@given(
    group_sizes(),
    st.lists(st.integers(-1, 2), min_size=ROWS, max_size=ROWS),
    st.booleans(),
)
def test_runs(sizes, slots, by_group):
    slots = np.array(slots, np.int32)
    run = compiled(row_runs, block_m=BLOCK, by_group=by_group)
    table = np.asarray(run(tables(sizes, slots, len(sizes))))
    group = np.repeat(np.arange(len(sizes)), sizes)
    slot = np.full(TILES * BLOCK, -1)
    slot[: len(group)] = slots[: len(group)]
    group = np.pad(group, (0, TILES * BLOCK - len(group)), constant_values=-1)
    for row in range(TILES * BLOCK):
        tile, place = divmod(row, BLOCK)
        end = row + 1
        while (
            end % BLOCK
            and slot[end] == slot[row]
            and (not by_group or slot[row] < 0 or group[end] == group[row])
        ):
            end += 1
        assert table[tile, 0, place] == slot[row]
        assert table[tile, 1, place] == end - tile * BLOCK
        if slot[row] >= 0:
            assert table[tile, 2, place] == group[row]
