"""What the Hopper kernels need to know about the rows, in plain JAX: runs, tiles and routes.

Computed from the routing alone, once for all products of a layer. Rows are sorted by counting,
very many by XLA's sort. Few rows of a route are laid out by a kernel, see `gpu_dispatch`; of few
that lie in order already all pairs are compared: launches cost more than comparisons.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.grouped_lora_matmul.gpu_run_table import run_table
from pallas_kernels.grouped_lora_matmul.gpu_schedule import tile_height, tiles_together
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import BLOCKS_OF_ROWS, piece_rows
from pallas_kernels.grouped_lora_matmul.gpu_tile_table import Ends, tile_table

UNSORTED_ROWS = 16  # so few rows hardly share experts: each is a tile of its own, unsorted
FEW_ROWS = 2048  # up to here all pairs of rows are compared
MOST_KEYS = 4096  # of (group, slot), and
MOST_COUNTED_ROWS = 65536  # of rows: up to here counting is faster than a sort
RADIX_ROWS = 16385  # from here on XLA sorts with the radix sort, which is several times faster


class Tiles(NamedTuple):
    """Tiles of consecutive rows of one group.

    Attributes:
      count: int32, its last element is how many tiles there are, a multiple of the schedule's
        `together`; the last ones may have no rows.
      words: int32 [tiles x TILE_WORDS], of each tile: its first row, how many, and their group (the
        number of groups for rows past them all, which become zeros).
    """

    count: jax.Array
    words: jax.Array


class Pieces(NamedTuple):
    """Adapted runs, cut into pieces of at most `piece_rows` rows.

    Attributes:
      count: int32, its last element is how many there are. row: the first row of each, then zeros.
      bare: int32 [1], how many rows have no adapter, so are in none.
    """

    count: jax.Array
    row: jax.Array
    bare: jax.Array


class OrderedRuns(NamedTuple):
    """All runs, in order of their rows.

    Attributes:
      begin: int32 [M + 1], the first row of each, then M.
      up_to: int32 [G], how many there are up to the end of each group.
    """

    begin: jax.Array
    up_to: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["place", "run_end", "pieces", "tiles", "runs", "arrivals"],
    meta_fields=["piece_rows", "in_order", "equal"],
)
@dataclasses.dataclass(frozen=True)
class Tables:
    """All about the rows of a layer.

    Attributes:
      place: int32 [M], group * 2^16 + slot + 1 of each row; slot -1 past the last group, whose
        number is the number of groups.
      run_end: int32 [M], where the row's run (rows of one place) ends.
      pieces, tiles: see there; no tiles where every row is one, or where groups are equal.
      runs: None unless rows are known to be sorted by group, and not by slot.
      arrivals: int32 [M], or [2 M] where a tile may have several rows, or [1] of rows in order:
        zeros, where a kernel's programs count, tile by tile, and leave zeros. None of many rows.
      piece_rows: the most rows of a piece; 0 where nobody reads pieces.
      in_order: whether rows are known to be sorted by (group, slot), so that each is one run.
      equal: whether all groups have equally many rows, so that tiles follow from their number.
    """

    place: jax.Array
    run_end: jax.Array
    pieces: Pieces
    tiles: Tiles | None
    runs: OrderedRuns | None = None
    arrivals: jax.Array | None = None
    piece_rows: int = 0
    in_order: bool = False
    equal: bool = False

    @property
    def rows_alone(self) -> bool:
        """Whether every row is a tile of its own, and rows are in no order."""
        return self.tiles is None and not self.equal

    @property
    def row_slots(self) -> jax.Array:
        """int32 [M], -1 without an adapter."""
        return slot_of(self.place)

    @property
    def group_of_row(self) -> jax.Array:
        """int32 [M]; the number of groups past the last group."""
        return group_of(self.place)


class Runs(NamedTuple):
    """The adapted runs of each bucket, a (slot, group) or a slot.

    Attributes:
      first, stop: int32 [buckets], which runs are the bucket's.
      begin, end: int32 [runs], the rows of each.
    """

    first: jax.Array
    stop: jax.Array
    begin: jax.Array
    end: jax.Array


class Route(NamedTuple):
    """Where the rows of a MoE layer go: the token of each row, and each choice's row."""

    token: jax.Array
    position: jax.Array
    tables: Tables


def place_of(group, slot, groups: int):
    """The word of a row: rows in order of place are sorted by group, then slot."""
    return group * 65536 + jnp.where(group < groups, slot, -1) + 1


def slot_of(place):
    """The slot in a place, in kernels too."""
    return (place & 0xFFFF) - 1


def group_of(place):
    """The group in a place, in kernels too."""
    return place >> 16


def most_tiles(groups: int, rows: int) -> int:
    """No routing makes more tiles than this."""
    height = tile_height(rows, groups)
    tiles = min(rows, rows // height + groups + 1)
    return _whole(tiles, tiles_together(rows / groups, height))


def _whole(count, unit: int):
    """The count up to the next multiple of the unit."""
    return (count + (unit - 1)) // unit * unit if unit > 1 else count


def tables(group_sizes, row_slots, groups: int) -> Tables:
    """Tables of rows that lie in order, group after group.

    Args:
      group_sizes: int32 [G], or None for M / G rows in every group.
      row_slots: int32 [M], -1 for rows without an adapter.
    """
    count = row_slots.shape[0]
    row = jnp.arange(count, dtype=jnp.int32)
    ends = group_ends(group_sizes, groups, count)
    group = jnp.sum(ends[None, :] <= row[:, None], axis=1, dtype=jnp.int32)
    place = place_of(group, row_slots, groups)
    equal = group_sizes is None
    tiles = None if equal else tiles_of_groups(Ends(ends, groups), count)
    few = count <= (FEW_ROWS if equal else BLOCKS_OF_ROWS)
    arrivals = zeros_to_count(row_slots, 1) if few else None
    known = dict(equal=equal, arrivals=arrivals)
    return dataclasses.replace(_tables(place, tiles, groups, ends), **known)


def _tables(place, tiles: Tiles | None, groups: int, ends=None) -> Tables:
    """Those of rows sorted by group, which end at `ends`; None: by (group, slot).

    Pieces end where a row's number is a multiple of the most that they have.
    """
    count = place.shape[0]
    most = piece_rows(count, groups)
    row = jnp.arange(count, dtype=jnp.int32)
    starts = _starts(place, row)
    cuts = (starts | (row % most == 0)) & (slot_of(place) >= 0)
    if count <= FEW_ROWS:
        run, piece = _numbers(starts), _numbers(cuts)
    else:
        run, piece = jnp.cumsum(jnp.stack([starts, cuts]), axis=1, dtype=jnp.int32)
    begin = jnp.pad(_rows_of(starts, run), (0, 1))
    # Of the last run, and past it.
    begin = jnp.where(np.arange(count + 1) < run[-1], begin, count)
    if count <= FEW_ROWS:
        # A launch less than by the number of the run.
        later = (row[None, :] > row[:, None]) & starts[None, :]
        run_end = jnp.min(jnp.where(later, row[None, :], count), axis=1)
    else:
        run_end = begin[run]
    pieces = _pieces(place, cuts, piece)
    if ends is None:
        return Tables(place, run_end, pieces, tiles, piece_rows=most, in_order=True)
    up_to = jnp.where(ends > 0, run[jnp.maximum(ends - 1, 0)], 0)
    return Tables(place, run_end, pieces, tiles, OrderedRuns(begin, up_to), piece_rows=most)


def _starts(place, row):
    """Which rows begin a run. A gather: XLA takes it into what comes next, and a roll not."""
    return (row == 0) | (place != place[jnp.maximum(row - 1, 0)])


def _pieces(place, cuts, number) -> Pieces:
    if place.shape[0] <= BLOCKS_OF_ROWS:
        return Pieces(place, place, place)  # nobody reads them
    bare = jnp.sum(slot_of(place) < 0, dtype=jnp.int32)
    return Pieces(number, _rows_of(cuts, number), bare[None])


def _numbers(marked):
    """How many rows are marked up to each, of few."""
    row = np.arange(marked.shape[0])
    before = (row[None, :] <= row[:, None]) & marked[None, :]
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def _rows_of(marked, number):
    """The marked rows in order, `number` of which are up to each row; then zeros."""
    row = jnp.arange(marked.shape[0], dtype=jnp.int32)
    if row.shape[0] <= FEW_ROWS:
        here = marked[None, :] & (number[None, :] == row[:, None] + 1)
        return jnp.sum(jnp.where(here, row[None, :], 0), axis=1)
    index = jnp.where(marked, number - 1, row.shape[0])
    return jnp.zeros_like(row).at[index].set(row, unique_indices=True, mode="drop")


def runs_of_buckets(tables: Tables, first_slot: int, slots: int, groups: int) -> Runs:
    """Buckets are numbered slot * groups + group; with `groups` 1 they are slots.

    Slots are `slots` from the first on, which is number 0 here.
    """
    place, count = tables.place, slots * groups
    row = jnp.arange(place.shape[0], dtype=jnp.int32)
    slot = tables.row_slots - first_slot
    mine = (slot >= 0) & (slot < slots)
    if tables.runs is not None and slots == 1 < groups:
        # Of one slot, runs are in order already: those of others stay among them, with no rows.
        begin, stop = tables.runs
        end = jnp.where(mine[begin[:-1]], begin[1:], begin[:-1])
        return Runs(jnp.pad(stop[:-1], (1, 0)), stop, begin[:-1], end)
    # Unsorted, every row is a run.
    starts = _starts(place, row) | tables.rows_alone
    group = tables.group_of_row if groups > 1 else 0
    bucket = jnp.where(starts & mine, slot * groups + group, count)
    if tables.in_order and groups > 1:
        begin, end = (
            jnp.zeros(count, jnp.int32).at[bucket].set(value, mode="drop", unique_indices=True)
            for value in (row, tables.run_end)
        )
        first = jnp.arange(count, dtype=jnp.int32)
        return Runs(first, first + (end > begin), begin, end)
    sizes = jnp.zeros(count, jnp.int32).at[bucket].add(1, mode="drop")
    stop = jnp.cumsum(sizes)
    # Short keys take half the passes of a radix sort.
    key = bucket.astype(jnp.uint16) if count < 65536 else bucket
    _, order = lax.sort((key, row), num_keys=1, is_stable=True)
    # A constant, which a gradient may get as NumPy's.
    return Runs(stop - sizes, stop, order, jnp.asarray(tables.run_end)[order])


def group_ends(group_sizes, groups: int, rows: int) -> jax.Array:
    """int32 [G]: the first row past each group."""
    if group_sizes is None:
        return (jnp.arange(groups, dtype=jnp.int32) + 1) * (rows // groups)
    before = jnp.arange(groups)[:, None] >= jnp.arange(groups)
    return jnp.sum(jnp.where(before, group_sizes, 0), axis=1, dtype=jnp.int32)


def tiles_of_groups(ends: Ends, rows: int) -> Tiles:
    """Those of groups that end at these rows, see `gpu_tile_table`."""
    return Tiles(*tile_table(ends, rows, most_tiles(ends.groups, rows)))


def plan(groups: int, slots: int, group, token_slots) -> Route:
    """Sorts (token, choice) rows by (group, slot), stably.

    Args:
      groups, slots: how many there are.
      group: int32 [T, choices], `groups` for rows that no group works on.
      token_slots: int32 [T], -1 for none.
    """
    tokens, choices = group.shape
    count = tokens * choices
    slot = jnp.broadcast_to(token_slots[:, None], group.shape).reshape(-1).astype(jnp.int32)
    place = place_of(group.reshape(-1).astype(jnp.int32), slot, groups)
    if (groups + 1) * (slots + 1) <= MOST_KEYS and count <= MOST_COUNTED_ROWS:
        token, position, tables = _route_counted(groups, slots, place, choices)
    else:
        order, position = _sorted_order(groups, slots, place)
        token = lax.div(order, jnp.int32(choices))
        ends = jnp.sum(
            place[None, :] < (jnp.arange(groups, dtype=jnp.int32)[:, None] + 1) * 65536,
            axis=1,
            dtype=jnp.int32,
        )
        tables = _tables(place[order], tiles_of_groups(Ends(ends, groups), count), groups)
    return Route(token, position.reshape(tokens, choices), tables)


def unsorted(place, arrivals) -> Tables:
    """Every row a run and a tile of its own, wherever its group is: no launches for a sort."""
    # A constant, which costs no launch; nobody reads the pieces of so few rows.
    end = jnp.asarray(np.arange(1, place.shape[0] + 1, dtype=np.int32))
    return Tables(place, end, Pieces(place, place, place), None, arrivals=arrivals)


def chosen(tokens, choices: int) -> Tables:
    """Of rows whose experts the kernel that runs them chooses.

    Args:
      tokens: int32 [T], the slot of each + 1, or -1 where no expert works on it.
    """
    arrivals = zeros_to_count(tokens, tokens.shape[0] * choices)
    return Tables(None, None, None, None, arrivals=arrivals)


def zeros_to_count(numbers, size: int):
    """`arrivals` of so many words; the numbers are any that are not as low as -2³⁰."""
    # What the compiler knows to be zero might be anybody's.
    return jnp.full(size, (jnp.min(numbers) < -(2**30)).astype(jnp.int32))


def _route_counted(groups, slots, place, choices):
    """A counting sort: how many rows of each key there are before a row's block, and in it.

    XLA's own sort is a call that splits the program's graph in two, which costs more than the sort.
    """
    count, keys = place.shape[0], (groups + 1) * (slots + 1)
    side = math.isqrt(count - 1) + 1  # as many blocks as a block has rows
    key = group_of(place) * (slots + 1) + slot_of(place) + 1
    key = lax.optimization_barrier(jnp.pad(key, (0, side * side - count), constant_values=keys))
    # Constants cost no launch.
    block, index = np.divmod(np.arange(side * side, dtype=np.int32), np.int32(side))
    # Sums of whole numbers: their order does not matter.
    of_block = jnp.zeros((keys, side), jnp.int32).at[key, block].add(1, mode="drop")
    total = lax.optimization_barrier(jnp.sum(of_block, axis=1, dtype=jnp.int32))
    begin = lax.optimization_barrier(_sum_before(total))
    # One sum over both the rows of a row's own block, and the blocks.
    other = jnp.arange(side, dtype=jnp.int32)
    same = (key.reshape(side, side)[block] == key[:, None]) & (other < index[:, None])
    earlier = jnp.where(other < block[:, None], of_block[key], 0)
    before = jnp.sum(same.astype(jnp.int32) + earlier, axis=1, dtype=jnp.int32)
    position = lax.optimization_barrier((begin[key] + before)[:count])
    row = jnp.arange(count, dtype=jnp.int32)
    order = jnp.zeros_like(row).at[position].set(row, unique_indices=True)
    most = piece_rows(count, groups)
    place, run_end, *pieces = run_table(begin, count, slots, most)
    # A group ends where the next one's first key begins.
    tiles = tiles_of_groups(Ends(begin, groups, slots + 1, slots + 1), count)
    pieces = Pieces(*pieces)
    tables = Tables(place, run_end, pieces, tiles, piece_rows=most, in_order=True)
    return lax.div(order, jnp.int32(choices)), position, tables


def _sum_before(values):
    """The sum of the values before each."""
    index = np.arange(values.shape[0])
    earlier = index[None, :] < index[:, None]
    return jnp.sum(jnp.where(earlier, values[None, :], 0), axis=1, dtype=jnp.int32)


def _sorted_order(groups, slots, place):
    """The row at each position of a stable sort, and each row's position."""
    count = place.shape[0]
    row = jnp.arange(count, dtype=jnp.int32)
    key = group_of(place) * (slots + 1) + slot_of(place) + 1
    # Short keys take half the passes of a radix sort.
    short = jnp.uint16 if (groups + 1) * (slots + 1) < 65536 else jnp.int32
    padding = max(0, RADIX_ROWS - count)
    key = jnp.pad(key.astype(short), (0, padding), constant_values=jnp.iinfo(short).max)
    _, order = lax.sort((key, jnp.pad(row, (0, padding))), num_keys=1, is_stable=True)
    order = order[:count]
    return order, jnp.zeros_like(row).at[order].set(row, unique_indices=True)
