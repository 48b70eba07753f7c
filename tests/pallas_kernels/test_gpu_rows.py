"""The tables that the Hopper kernels run by, against plain NumPy."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul import gpu_rows
from pallas_kernels.grouped_lora_matmul.gpu_dispatch import (
    MAX_GROUPS,
    dispatch_few,
    dispatch_unsorted,
)
from pallas_kernels.grouped_lora_matmul.gpu_rows import (
    FEW_ROWS,
    MOST_COUNTED_ROWS,
    MOST_KEYS,
    RADIX_ROWS,
    UNSORTED_ROWS,
    most_tiles,
)
from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILE_WORDS, tile_height, tiles_together
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import BLOCKS_OF_ROWS, piece_rows
from pallas_kernels.grouped_lora_matmul.gpu_tile_table import equal_tile, equal_tiles

# Tokens, choices, groups, slots: both sides of every limit of `gpu_rows`.
ROUTES = [
    (1, 1, 1, 1),
    (UNSORTED_ROWS // 8, 8, 128, 8),
    (UNSORTED_ROWS + 1, 1, 5, 3),
    (BLOCKS_OF_ROWS + 1, 1, 3, 2),
    (FEW_ROWS // 64, 8, MAX_GROUPS, 1),
    (FEW_ROWS // 64, 8, MAX_GROUPS + 1, 1),
    (FEW_ROWS + 1, 1, MOST_KEYS // 4 - 1, 3),
    (FEW_ROWS + 1, 1, MOST_KEYS // 4, 3),
    (MOST_COUNTED_ROWS + 1, 1, 5, 1),
    ((RADIX_ROWS - 1) // 8, 8, 128, 64),
    (RADIX_ROWS, 1, 512, 127),
]
SLOW_ROUTES = [
    ((FEW_ROWS + 1) // 3, 3, 7, 5),
    (FEW_ROWS, 1, 1, 4),
    (BLOCKS_OF_ROWS // 8, 8, 512, 8),
    (64, 1, 32, 8),
    (FEW_ROWS // 8, 8, 64, 16),
    (FEW_ROWS // 2, 2, 512, 65535),
    (FEW_ROWS // 8 + 1, 8, 128, 8),
    (FEW_ROWS, 2, 512, 65535),
    (MOST_COUNTED_ROWS // 8, 8, 7, 2),
    (RADIX_ROWS, 1, 511, 127),
]
# Rows, groups.
TABLES = [
    (1, 1),
    (40, 3),
    (BLOCKS_OF_ROWS, 32),
    (BLOCKS_OF_ROWS + 1, 512),
    (FEW_ROWS, 1),
    (FEW_ROWS + 1, 128),
    (3 * FEW_ROWS, 5),
]


@functools.cache
def compiled_route(groups, slots):
    """The route, and of few rows, which a kernel lays out, x; in Pallas's interpreter."""

    @jax.jit
    def route(group, slot):
        if group.size <= UNSORTED_ROWS:
            return dispatch_unsorted(numbered(len(slot)), groups, group, slot, None)
        if group.size <= FEW_ROWS and groups <= MAX_GROUPS:
            return dispatch_few(numbered(len(slot)), groups, group, slot, None)
        return gpu_rows.plan(groups, slots, group, slot), None

    return route


def numbered(tokens):
    """An x that tells of which token it is, wider than it is high."""
    return np.arange(tokens, dtype=np.float32)[:, None] + np.zeros((1, 24), np.float32)


@functools.cache
def compiled_tables(groups):
    return jax.jit(functools.partial(gpu_rows.tables, groups=groups))


def places(group, slot, groups):
    """The words of rows, from the documentation of `Tables`."""
    return group * 2**16 + np.where(group < groups, slot, -1) + 1


def check_runs(found: gpu_rows.Tables, place):
    """Every row's place, and the end of its run of equal places."""
    assert found.place.tolist() == place.tolist()
    assert found.group_of_row.tolist() == (place >> 16).tolist()
    assert found.row_slots.tolist() == ((place & 0xFFFF) - 1).tolist()
    last = np.flatnonzero(np.append(place[1:] != place[:-1], True))
    ends = last[np.searchsorted(last, np.arange(len(place)))] + 1
    assert found.run_end.tolist() == ends.tolist()
    if found.runs is not None:
        begins = np.full(len(place) + 1, len(place))
        begins[: len(last)] = np.append(0, last[:-1] + 1)
        assert found.runs.begin.tolist() == begins.tolist()
        groups = np.arange(len(found.runs.up_to))
        assert found.runs.up_to.tolist() == [sum(place[last] >> 16 <= its) for its in groups]


def tiles_of(found: gpu_rows.Tiles, place, groups):
    """Row, number of rows and group of each tile; checks those without rows, which fill up."""
    together = tiles_together(len(place) / groups, tile_height(len(place), groups))
    count, words = int(found.count[-1]), np.asarray(found.words).reshape(-1, TILE_WORDS)
    assert count <= len(words) == most_tiles(groups, len(place))
    assert count % together == 0
    row, rows, group = words[:count, :3].T
    used = np.count_nonzero(rows)
    assert count - used < together and (rows[:used] > 0).all()
    assert (group[used:] == groups).all()
    return row[:used], rows[:used], group[:used]


def check_tiles(found: gpu_rows.Tiles, place, groups):
    """Every row, past the groups too, is in one tile; tiles of a group are together, in order."""
    row, rows, group = tiles_of(found, place, groups)
    assert rows.max() <= tile_height(len(place), groups)
    covered = np.zeros(len(place), int)
    for begin, count, of in zip(row, rows, group, strict=True):
        assert (place[begin : begin + count] >> 16 == of).all()
        covered[begin : begin + count] += 1
    assert (covered == 1).all()
    same = group[1:] == group[:-1]
    assert np.count_nonzero(~same) + 1 == len(np.unique(group))
    assert (row[1:] == row[:-1] + rows[:-1])[same].all()


def check_pieces(found: gpu_rows.Tables, place, groups):
    """Every row with an adapter is in one piece, no other row is; a piece has one place."""
    if len(place) <= BLOCKS_OF_ROWS:
        return
    covered = np.zeros(len(place), int)
    run_end, rows = np.asarray(found.run_end), np.asarray(found.pieces.row)
    count = found.pieces.count[-1]
    assert not rows[count:].any()  # read ahead
    assert found.pieces.bare.tolist() == [np.count_nonzero((place & 0xFFFF) == 0)]
    assert found.piece_rows == piece_rows(len(place), groups)
    for begin, after in itertools.pairwise([*rows[:count], len(place)]):
        end = min(run_end[begin], after) if after > begin else run_end[begin]
        assert 0 < end - begin <= found.piece_rows
        covered[begin:end] += 1
    assert covered.tolist() == ((place & 0xFFFF) > 0).astype(int).tolist()


def routing(rng, tokens, choices, groups, slots, crowded):
    """Random choices and slots; crowded: mostly of one group and one slot."""
    group = rng.integers(0, groups + 1, (tokens, choices))
    slot = rng.integers(-1, slots, tokens)
    if crowded:
        group = np.where(rng.random(group.shape) < 0.9, group[0, 0], group)
        slot = np.where(rng.random(tokens) < 0.9, slot[0], slot)
    return group.astype(np.int32), slot.astype(np.int32)


@pytest.mark.parametrize(
    "tokens, choices, groups, slots",
    [*ROUTES, *(pytest.param(*route, marks=pytest.mark.slow) for route in SLOW_ROUTES)],
)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), crowded=st.booleans())
def test_route(tokens, choices, groups, slots, seed, crowded):
    group, slot = routing(np.random.default_rng(seed), tokens, choices, groups, slots, crowded)
    found, rows = jax.tree.map(np.asarray, compiled_route(groups, slots)(group, slot))
    check_route(found, group, slot, groups)
    counted = (groups + 1) * (slots + 1) <= MOST_KEYS and group.size <= MOST_COUNTED_ROWS
    if rows is None and counted:
        check_order_of_pieces(found.tables)
    if rows is not None:
        assert rows.tolist() == numbered(tokens)[found.token].tolist()


@pytest.mark.parametrize("tokens, dispatch", [(40, dispatch_few), (7, dispatch_unsorted)])
def test_rows_that_no_group_works_on(tokens, dispatch):
    """Tokens that are not valid, and numbers that are not of a group; and the x of all rows."""
    groups = 6
    rng = np.random.default_rng(0)
    slot = rng.integers(-1, 3, tokens).astype(np.int32)
    group = rng.integers(-2, groups + 3, (tokens, 2)).astype(np.int32)
    valid = rng.random(tokens) < 0.7
    x = numbered(tokens)
    found, rows = jax.tree.map(np.asarray, dispatch(x, groups, group, slot, valid))
    assert rows.tolist() == x[found.token].tolist()
    works = (group >= 0) & (group < groups) & valid[:, None]
    check_route(found, np.where(works, group, groups), slot, groups)


def check_route(found: gpu_rows.Route, group, slot, groups):
    rows, choices = group.size, group.shape[1]
    place = places(group.reshape(-1), np.repeat(slot, choices), groups)
    order = np.arange(rows) if rows <= UNSORTED_ROWS else np.argsort(place, stable=True)
    assert found.token.tolist() == (order // choices).tolist()
    assert found.position.shape == group.shape
    assert found.position.reshape(-1)[order].tolist() == list(range(rows))
    if found.tables.arrivals is None:
        assert rows > FEW_ROWS or groups > MAX_GROUPS
    else:
        assert found.tables.arrivals.tolist() == [0] * rows * (1 if rows <= UNSORTED_ROWS else 2)
    if rows <= UNSORTED_ROWS:
        check_unsorted(found.tables, place)
        return
    check_runs(found.tables, place[order])
    check_tiles(found.tables.tiles, place[order], groups)
    check_pieces(found.tables, place[order], groups)


def check_order_of_pieces(found: gpu_rows.Tables):
    """By slots, then rows: neighbours read what is near in memory."""
    rows = found.pieces.row[: found.pieces.count[-1]]
    assert np.lexsort((rows, found.row_slots[rows])).tolist() == list(range(len(rows)))


def check_unsorted(found: gpu_rows.Tables, place):
    """Every row is a run and a tile of its own."""
    rows = list(range(len(place)))
    assert found.place.tolist() == place.tolist()
    assert found.run_end.tolist() == [row + 1 for row in rows]
    assert found.tiles is None


@st.composite
def group_sizes(draw, rows, groups):
    """Ragged and empty groups, with rows past the last one or without."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    used = draw(st.sampled_from([rows, rows // 2, 0, rows - 1]))
    cuts = np.sort(rng.integers(0, used + 1, groups))
    cuts[: draw(st.integers(0, groups - 1))] = 0
    cuts[-1] = used
    return np.diff(cuts, prepend=0).astype(np.int32)


@pytest.mark.parametrize("rows, groups", TABLES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_tables(rows, groups, data):
    sizes = data.draw(group_sizes(rows, groups))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    slots = np.repeat(rng.integers(-1, 4, rows), rng.integers(1, 90, rows))[:rows].astype(np.int32)
    found = jax.tree.map(np.asarray, compiled_tables(groups)(sizes, slots))
    group = np.repeat(np.arange(groups + 1), np.append(sizes, rows - sizes.sum()))
    place = places(group, slots, groups)
    check_runs(found, place)
    check_tiles(found.tiles, place, groups)
    check_pieces(found, place, groups)


EQUAL = [(50, 5), (700, 7), (13, 5), (3, 5), (1, 1), (2000, 1), (144, 1), (145, 1), (6001, 3)]


@pytest.mark.parametrize("rows, groups", EQUAL)
def test_equal_groups(rows, groups):
    slots = np.arange(rows, dtype=np.int32) % 3 - 1
    found = jax.tree.map(np.asarray, compiled_tables(groups)(None, slots))
    group = np.repeat(np.arange(groups + 1), [*[rows // groups] * groups, rows % groups])
    place = places(group, slots, groups)
    check_runs(found, place)
    assert found.tiles is None and found.equal
    tiles = tiles_without_table(rows, groups, tile_height(rows, groups))
    check_tiles(tiles, place, groups)
    check_pieces(found, place, groups)


def tiles_without_table(rows, groups, height):
    """What a product computes of tiles whose groups are equal, as a table."""
    words = np.zeros((most_tiles(groups, rows), TILE_WORDS), np.int32)
    count = equal_tiles(rows, groups, height, tiles_together(rows / groups, height))
    number = np.arange(count, dtype=np.int32)
    words[:count, :3] = np.stack(equal_tile(rows, groups, height, number), axis=1)
    return gpu_rows.Tiles(np.array([count]), words)


def test_tiles_of_a_group_are_equal():
    """Large groups are cut in tiles of equal height, give or take a row; tall ones come first."""
    sizes, slots = np.array([1000, 3000, 20], np.int32), np.zeros(4100, np.int32)
    found = compiled_tables(3)(sizes, slots).tiles
    place = places(np.repeat(np.arange(4), [*sizes, 80]), slots, 3)
    _, rows, group = tiles_of(found, place, 3)
    for of in range(3):
        heights = rows[group == of]
        assert heights.sum() == sizes[of] and heights.max() - heights.min() <= 1
    assert (np.diff(rows[group < 3]) <= 1).all() and group[-1] == 3


@pytest.mark.parametrize("sorted_slots", [True, False])
@pytest.mark.parametrize("by_group", [True, False])
@pytest.mark.parametrize("first_slot, slots", [(0, 3), (0, 1), (1, 2), (1, 1)])
def test_runs_of_buckets(sorted_slots, by_group, first_slot, slots):
    """The runs of each bucket, in order of rows, whatever the order of slots inside a group.

    Slots before the first, and past the last, are of other rank classes.
    """
    rng, groups = np.random.default_rng(0), 5
    total = first_slot + slots + (first_slot > 0)
    sizes = np.array([40, 0, 33, 7, 100], np.int32)
    slot = np.concatenate(
        [rng.integers(-1, total, size) for size in sizes] + [rng.integers(0, total, 9)]
    )
    ends = np.cumsum(sizes)
    if sorted_slots:
        slot = np.concatenate([np.sort(part) for part in np.split(slot, ends)])
    group = np.concatenate([np.repeat(np.arange(groups), sizes), np.full(9, groups)])
    tables = compiled_tables(groups)(sizes, slot.astype(np.int32))
    for in_order in {False, sorted_slots and by_group}:
        runs = None if in_order else tables.runs
        tables = dataclasses.replace(tables, in_order=in_order, runs=runs)
        check_buckets(tables, group, slot, groups, by_group, first_slot, slots)


@pytest.mark.parametrize("by_group", [True, False])
@pytest.mark.parametrize("slots", [1, 2])
def test_runs_of_unsorted_rows(by_group, slots):
    """So few rows lie in no order at all."""
    rng, groups = np.random.default_rng(1), 5
    group = rng.integers(0, groups + 1, (UNSORTED_ROWS // 2, 2)).astype(np.int32)
    slot = rng.integers(-1, slots, len(group)).astype(np.int32)
    tables = compiled_route(groups, slots)(group, slot)[0].tables
    check_buckets(tables, group.reshape(-1), np.repeat(slot, 2), groups, by_group, 0, slots)


def check_buckets(tables, group, slot, groups, by_group, first_slot, slots):
    runs = gpu_rows.runs_of_buckets(tables, first_slot, slots, groups if by_group else 1)
    first, stop, begin, end = map(np.asarray, runs)
    for bucket, (a, b) in enumerate(zip(first, stop, strict=True)):
        its_slot, its_group = divmod(bucket, groups) if by_group else (bucket, None)
        mine = (slot == first_slot + its_slot) & (group < groups)
        if by_group:
            mine &= group == its_group
        found = np.concatenate([np.arange(begin[run], end[run]) for run in range(a, b)] or [[]])
        assert found.tolist() == np.flatnonzero(mine).tolist()
