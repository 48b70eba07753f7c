"""The table of tiles of many sorted rows, laid out by one kernel from the sizes of their groups.

In plain JAX it took eight kernels, of one to two microseconds each whatever they do. Nothing is
handed from one program to another: each looks at all groups, and writes some of the tiles.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILE_WORDS, tile_height, tiles_together

TILES = 16  # of a program
BLOCK = 16384  # numbers that a program compares at once


class Ends(NamedTuple):
    """int32, the first row past each group: every `stride`th number of an array from `first` on."""

    array: jax.Array
    groups: int
    first: int = 0
    stride: int = 1


def tile_table(ends: Ends, rows: int, most: int) -> tuple[jax.Array, jax.Array]:
    """Cuts each group, and the rows past them all, into tiles of equal height (give or take 1).

    Tall tiles first: then programs, which take them in turns, end at about the same time.

    Args:
      most: tiles that the table has room for.

    Returns:
      `count` and `words` of `gpu_rows.Tiles`.
    """
    sizes = _Sizes(rows, *ends[1:], most)
    call = pl.pallas_call(
        functools.partial(_kernel, sizes),
        out_shape=[
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct((most * TILE_WORDS,), jnp.int32),
        ],
        grid=(pl.cdiv(most, sizes.tiles),),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=jax.default_backend() == "cpu",
        name=f"lora_tiles_g{sizes.groups}",
    )
    return tuple(call(ends.array.astype(jnp.int32)))


class _Sizes(NamedTuple):
    rows: int
    groups: int
    first: int
    stride: int
    most: int

    @property
    def block(self) -> int:
        return pl.next_power_of_2(self.groups)

    @property
    def others(self) -> int:
        """How many groups all are compared with at once."""
        return max(1, min(self.block, BLOCK // self.block))

    @property
    def tiles(self) -> int:
        """Of a program."""
        return max(1, min(TILES, BLOCK // self.block))

    @property
    def height(self) -> int:
        return tile_height(self.rows, self.groups)


def _end(sizes: _Sizes, ends, group, other):
    """The first row past a group, or past each; where there is none, another number."""
    exists = (group >= 0) & (group < sizes.groups)
    return plgpu.load(ends.at[sizes.first + group * sizes.stride], mask=exists, other=other)


class _Groups(NamedTuple):
    """Some groups, as arrays: how many tiles, and of how many rows; those past the last: none."""

    number: jax.Array
    tiles: jax.Array
    tall: jax.Array


def _groups(sizes: _Sizes, ends, first, count: int) -> _Groups:
    number = first + lax.iota(jnp.int32, count)
    begin = _end(sizes, ends, number - 1, other=0)
    size = jnp.where(number < sizes.groups, _end(sizes, ends, number, other=0) - begin, 0)
    tiles = tiles_of(size, sizes.height)
    return _Groups(number, tiles, lax.div(size, jnp.maximum(tiles, 1)))


def _kernel(sizes: _Sizes, ends, count, words):
    its = _groups(sizes, ends, 0, sizes.block)

    def add_up(i, before):
        other = _groups(sizes, ends, i * sizes.others, sizes.others)
        same = other.tall[None] == its.tall[:, None]
        first = same & (other.number[None] < its.number[:, None])
        taller = other.tall[None] > its.tall[:, None]
        return before + jnp.where(taller | first, other.tiles[None], 0)

    before = jnp.zeros((sizes.block, sizes.others), jnp.int32)
    before = lax.fori_loop(0, sizes.block // sizes.others, add_up, before)
    first, total = jnp.sum(before, axis=1, dtype=jnp.int32), jnp.sum(its.tiles, dtype=jnp.int32)

    tile = pl.program_id(0) * sizes.tiles + lax.iota(jnp.int32, sizes.tiles)
    # Of the one group whose tile it is.
    here = (tile[:, None] >= first[None]) & (tile[:, None] < (first + its.tiles)[None])

    def of_group(values, past_all):
        found = jnp.sum(jnp.where(here, values[None], 0), axis=1, dtype=jnp.int32)
        return jnp.where(tile < total, found, past_all)

    group, its_first = of_group(its.number, sizes.groups), of_group(first, total)
    begin = _end(sizes, ends, group - 1, other=0)
    size = _end(sizes, ends, group, other=sizes.rows) - begin
    offset, rows = _equal_cut(size, tiles_of(size, sizes.height), tile - its_first)
    last = sizes.first + (sizes.groups - 1) * sizes.stride
    adrift = tiles_of(sizes.rows - ends[last], sizes.height)
    used = tile < total + adrift
    values = [
        jnp.where(used, value, unused)
        for value, unused in ((begin + offset, 0), (rows, 0), (group, sizes.groups))
    ]
    write_words(words, tile, values, tile < sizes.most)

    @pl.when(pl.program_id(0) == 0)
    def _count():
        together = tiles_together(sizes.rows / sizes.groups, sizes.height)
        count[0] = tiles_of(total + adrift, together) * together


def equal_tiles(rows: int, groups: int, height: int, together: int) -> int:
    """How many tiles there are of rows of equal groups, those without rows among them."""
    size, rest = divmod(rows, groups)
    used = groups * pl.cdiv(size, height) + pl.cdiv(rest, height)
    return pl.cdiv(used, together) * together


def equal_tile(rows: int, groups: int, height: int, tile):
    """The words of a tile of rows of equal groups: what the table would say, without one."""
    size, rest = divmod(rows, groups)
    of_group, past_all = pl.cdiv(size, height), pl.cdiv(rest, height)
    inside = tile < groups * of_group
    group = jnp.where(inside, lax.div(tile, jnp.int32(max(of_group, 1))), groups)
    pieces = jnp.where(inside, of_group, past_all)
    offset, count = _equal_cut(jnp.where(inside, size, rest), pieces, tile - group * of_group)
    used = tile < groups * of_group + past_all
    words = (group * size + offset, 0), (count, 0), (group, groups)
    return tuple(jnp.where(used, word, unused) for word, unused in words)


def _equal_cut(size, pieces, piece):
    """Where a piece starts and its size, when `size` rows are cut in equal pieces."""
    pieces = jnp.maximum(pieces, 1)
    shorter, longer = lax.div(size, pieces), lax.rem(size, pieces)
    return piece * shorter + jnp.minimum(piece, longer), shorter + (piece < longer)


def tiles_of(rows, height: int):
    """How many tiles of a height so many rows take."""
    return lax.div(rows + (height - 1), jnp.int32(height))


def write_words(words, tile, values, mask):
    """Writes the first words of some tiles."""
    # The interpreter writes what is masked too, as it was: it must not be some other tile's.
    tile = jnp.where(mask, tile, words.shape[0])
    for word, value in enumerate(values):
        plgpu.store(words.at[tile * TILE_WORDS + word], value, mask=mask)
