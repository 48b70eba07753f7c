"""Few rows laid out by one kernel: their order, what is to be known of them, and their x.

At decode sizes launches cost most. So nothing is handed from one kernel to the next: each program
has some of the (token, choice) rows, and counts for itself where they go, by comparing them with
all rows, and how many tiles lie before theirs, from the sizes of all groups.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import implementation
from pallas_kernels.grouped_lora_matmul import gpu_unsorted
from pallas_kernels.grouped_lora_matmul.gpu_piece_table import piece_table
from pallas_kernels.grouped_lora_matmul.gpu_rows import (
    Pieces,
    Route,
    Tables,
    Tiles,
    group_of,
    most_tiles,
    place_of,
    unsorted,
)
from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILE_WORDS, tile_height, tiles_together
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import BLOCKS_OF_ROWS, piece_rows
from pallas_kernels.grouped_lora_matmul.gpu_tile_table import tiles_of, write_words
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.rows import THREADS

MAX_GROUPS = 1024  # a program counts the rows of all of them at once
FEWEST = 4  # rows of a program
BLOCK = 16384  # numbers that a program has at once: of counters, and of x
BLOCKS_AT_ONCE = 8  # of other rows, that are loaded before they are compared


def dispatch_few(x, groups: int, group, token_slots, valid) -> tuple[Route, jax.Array]:
    """The route of rows sorted by (group, slot), stably, and the x of each in its order.

    Args:
      x: [T, K]. groups: at most MAX_GROUPS.
      group: int32 [T, choices]; rows of any number that is not one of a group have none.
      token_slots: int32 [T], -1 for none.
      valid: bool [T], False: the token's rows have no group; None: all have.
    """
    rows = group.size
    height = max(FEWEST, pl.next_power_of_2(pl.cdiv(rows, PROGRAMS)))
    sizes = _Sizes(rows, group.shape[1], groups, height)
    numbers = (rows, 2 * rows, rows, rows, rows, most_tiles(groups, rows) * TILE_WORDS, 1)
    found, position, arrivals, token, place, run_end, words, count = _call(
        _sorted_kernel, "lora_dispatch", sizes, numbers, x, group, token_slots, valid
    )
    # By blocks of rows, nobody reads the pieces.
    pieces, most = Pieces(place, place, place), piece_rows(rows, groups)
    if rows > BLOCKS_OF_ROWS:
        pieces = Pieces(*piece_table(place, most))
    tiles = Tiles(count, words)
    known = dict(arrivals=arrivals, piece_rows=most, in_order=True)
    tables = Tables(place, run_end, pieces, tiles, **known)
    return Route(token, position.reshape(group.shape), tables), found


def dispatch_unsorted(x, groups: int, group, token_slots, valid) -> tuple[Route, jax.Array]:
    """The same of very few rows that stay in order: each is a run and a tile of its own.

    Args: see `dispatch_few`; of any number of groups.
    """
    rows, choices = group.size, group.shape[1]
    sizes = _Sizes(rows, choices, groups, 1)
    routing = group, token_slots, valid
    if x.shape[1] % THREADS == 0 and implementation.DEPENDENT_LAUNCH:
        found, place, arrivals = gpu_unsorted.lay_out(x, groups, *routing)
    else:
        kernel = _unsorted_kernel, "lora_rows", sizes, (rows, rows)
        found, place, arrivals = _call(*kernel, x, *routing)
    row = np.arange(rows, dtype=np.int32)  # constants cost no launch
    token, position = jnp.asarray(row // choices), jnp.asarray(row.reshape(group.shape))
    return Route(token, position, unsorted(place, arrivals)), found


def _call(kernel, name: str, sizes: _Sizes, numbers, x, group, token_slots, valid):
    """x of all rows, and arrays of so many int32 numbers."""
    width = x.shape[1]
    routing = [group.reshape(-1), token_slots, *([] if valid is None else [valid])]

    def body(*refs):
        found = _Routing(*refs[: len(routing)])
        kernel(sizes, found, *refs[len(routing) :])

    call = pl.pallas_call(
        body,
        out_shape=[
            jax.ShapeDtypeStruct((sizes.rows, width), x.dtype),
            *(jax.ShapeDtypeStruct((number,), jnp.int32) for number in numbers),
        ],
        grid=(pl.cdiv(sizes.rows, sizes.height),),
        compiler_params=plgpu.CompilerParams(num_warps=8),
        interpret=jax.default_backend() == "cpu",
        name=f"{name}_k{width}",
    )
    return call(*(its.astype(jnp.int32) for its in routing), x)


class _Routing(NamedTuple):
    """References to what `dispatch_few` is told."""

    group: jax.Array
    token_slots: jax.Array
    valid: jax.Array | None = None


class _Sizes(NamedTuple):
    rows: int
    choices: int
    groups: int
    height: int  # rows of a program

    @property
    def groups_block(self) -> int:
        return pl.next_power_of_2(self.groups)

    @property
    def others(self) -> int:
        """How many rows a program compares its own with at once."""
        return min(pl.next_power_of_2(self.rows), 64, BLOCK // self.groups_block)

    @property
    def together(self) -> int:
        """How many times that is loaded at once."""
        return min(BLOCKS_AT_ONCE, pl.cdiv(self.rows, self.others))


class _Rows(NamedTuple):
    """Some rows, as arrays. Those past the last have a place after all others."""

    row: jax.Array
    token: jax.Array
    place: jax.Array
    exist: jax.Array


def _rows(sizes: _Sizes, routing: _Routing, first, count: int) -> _Rows:
    row = first + lax.iota(jnp.int32, count)
    exist, token = row < sizes.rows, lax.div(row, jnp.int32(sizes.choices))
    number = plgpu.load(routing.group.at[row], mask=exist, other=-1)
    works = number >= 0
    if routing.valid is not None:
        works &= plgpu.load(routing.valid.at[token], mask=exist, other=0) != 0
    number = jnp.where(works, jnp.minimum(number, sizes.groups), sizes.groups)
    slot = plgpu.load(routing.token_slots.at[token], mask=exist, other=-1)
    place = jnp.where(exist, place_of(number, slot, sizes.groups), jnp.iinfo(jnp.int32).max)
    return _Rows(row, token, place, exist)


def _unsorted_kernel(sizes: _Sizes, routing: _Routing, x, y, place_out, arrivals):
    own = _rows(sizes, routing, pl.program_id(0) * sizes.height, sizes.height)
    for out, value in (place_out, own.place), (arrivals, jnp.zeros_like(own.row)):
        plgpu.store(out.at[own.row], value, mask=own.exist)
    _copy_rows(own, own.row, x, y, _load_rows(own, x, 0))


def _sorted_kernel(
    sizes: _Sizes,
    routing: _Routing,
    x,
    y,
    position_out,
    arrivals,
    token_out,
    place_out,
    run_end_out,
    words,
    count,
):
    rows_at = functools.partial(_rows, sizes, routing)
    own = rows_at(pl.program_id(0) * sizes.height, sizes.height)
    begun = _load_rows(own, x, 0)  # on its way while rows are counted
    position, run_end, rows_of_group = _compare(sizes, own, rows_at)
    for out, row, value in (
        (position_out, own.row, position),
        (arrivals, own.row, jnp.zeros_like(own.row)),
        (arrivals, sizes.rows + own.row, jnp.zeros_like(own.row)),
        (token_out, position, own.token),
        (place_out, position, own.place),
        (run_end_out, position, run_end),
    ):
        plgpu.store(out.at[row], value, mask=own.exist)
    _lay_out_tiles(sizes, own, position, rows_of_group, words, count)
    _copy_rows(own, position, x, y, begun)


def _compare(sizes: _Sizes, own: _Rows, rows_at):
    """Where the program's rows go, where their runs end, and the rows of every group."""
    groups = lax.iota(jnp.int32, sizes.groups_block)

    def compare(i, counts):
        first = i * sizes.together * sizes.others
        # All on their way before the first is compared: else each would wait for memory.
        loaded = [
            rows_at(first + block * sizes.others, sizes.others) for block in range(sizes.together)
        ]
        for other in loaded:
            place, mine = other.place[None], own.place[:, None]
            earlier = (place == mine) & (other.row[None] < own.row[:, None])
            found = (place < mine) | earlier, place <= mine, group_of(place) == groups[:, None]
            counts = [
                count + its.astype(jnp.int32) for count, its in zip(counts, found, strict=True)
            ]
        return counts

    heights = sizes.height, sizes.height, sizes.groups_block
    start = [jnp.zeros((height, sizes.others), jnp.int32) for height in heights]
    at_once = sizes.together * sizes.others
    counts = lax.fori_loop(0, pl.cdiv(sizes.rows, at_once), compare, start)
    return [jnp.sum(count, axis=1, dtype=jnp.int32) for count in counts]


def _lay_out_tiles(sizes: _Sizes, own: _Rows, position, rows_of_group, words, count):
    """Writes the words of the tiles that begin with the program's rows; the first, how many."""
    rows, groups = sizes.rows, sizes.groups
    height, together = (
        tile_height(rows, groups),
        tiles_together(rows / groups, tile_height(rows, groups)),
    )
    number = lax.iota(jnp.int32, sizes.groups_block)
    rows_of_group = jnp.where(number < groups, rows_of_group, 0)
    tiles_of_group = tiles_of(rows_of_group, height)
    group = group_of(own.place)

    def add_up(which, values):
        return jnp.sum(jnp.where(which, values[None], 0), axis=1, dtype=jnp.int32)

    before, here = number[None] < group[:, None], number[None] == group[:, None]
    begin, tile = add_up(before, rows_of_group), add_up(before, tiles_of_group)
    end = jnp.where(group < groups, begin + add_up(here, rows_of_group), rows)
    tile += lax.div(position - begin, jnp.int32(height))
    first = (lax.rem(position - begin, jnp.int32(height)) == 0) & own.exist
    write_words(words, tile, (position, jnp.minimum(end - position, height), group), first)

    @pl.when(pl.program_id(0) == 0)
    def _count():
        adrift = rows - jnp.sum(rows_of_group, dtype=jnp.int32)
        used = jnp.sum(tiles_of_group, dtype=jnp.int32) + tiles_of(adrift, height)
        whole = tiles_of(used, together) * together
        count[0] = whole
        if together > 1:
            unused = used + lax.iota(jnp.int32, pl.next_power_of_2(together))
            nothing = jnp.zeros_like(unused)
            write_words(words, unused, (nothing, nothing, nothing + groups), unused < whole)


def _copy_rows(own: _Rows, position, x, y, begun):
    """Copies the x of the program's rows, whose first columns are `begun`."""
    _store_rows(own, position, y, 0, begun)

    def copy(i, _):
        _store_rows(own, position, y, i, _load_rows(own, x, i))

    lax.fori_loop(1, pl.cdiv(x.shape[1], begun.shape[1]), copy, None)


def _load_rows(own: _Rows, x, i):
    """Some columns of the x of the program's rows."""
    columns, mask = _columns(own, x, i)
    return plgpu.load(x.at[own.token[:, None], columns], mask=mask, other=0)


def _store_rows(own: _Rows, position, y, i, values):
    columns, mask = _columns(own, y, i)
    plgpu.store(y.at[position[:, None], columns], values, mask=mask)


def _columns(own: _Rows, array, i):
    width = array.shape[1]
    block = min(pl.next_power_of_2(width), BLOCK // own.row.shape[0])
    columns = i * block + lax.iota(jnp.int32, block)[None]
    return columns, own.exist[:, None] & (columns < width)
