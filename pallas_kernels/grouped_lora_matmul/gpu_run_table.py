"""The tables of runs of many counted rows, laid out by one kernel from how many rows a key has.

Keys are (group, slot), in order, so that a key's rows are one run. In plain JAX it took nine
kernels of two microseconds and more, two scatters among them. Nothing is handed from one program to
another: each counts the pieces before its keys, and writes what is to be known of their rows.

Pieces are in order of their slots, then groups: programs that work on neighbours read an array of
factors [slots, groups, …] from one end to the other. Group by group they would read it at as many
places as there are slots, a power of two apart, and take a tenth longer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.hopper.machine import PROGRAMS

ROWS = 128  # that a program writes at once


class RunTable(NamedTuple):
    """`place` and `run_end` of `gpu_rows.Tables`, and the numbers of `Pieces`."""

    place: jax.Array
    run_end: jax.Array
    piece_count: jax.Array
    piece_row: jax.Array
    bare: jax.Array


def run_table(begin, rows: int, slots: int, most: int) -> RunTable:
    """Of rows in order of their keys.

    Args:
      begin: int32 [keys], the first row of each key, group * (slots + 1) + slot + 1.
      rows: how many there are. most: of a piece, a multiple of 8. A run's pieces are of equally
        many, in whole 8, but for the last.
    """
    sizes = _Sizes(rows, begin.shape[0], slots, most)
    numbers = rows, rows, 1, rows, 1
    call = pl.pallas_call(
        functools.partial(_kernel, sizes),
        out_shape=[jax.ShapeDtypeStruct((number,), jnp.int32) for number in numbers],
        grid=(sizes.programs,),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=jax.default_backend() == "cpu",
        name=f"lora_runs_k{sizes.keys}",
    )
    return RunTable(*call(begin))


class _Sizes(NamedTuple):
    rows: int
    keys: int
    slots: int
    most: int

    @property
    def of_program(self) -> int:
        """Keys of a program."""
        return pl.cdiv(self.keys, PROGRAMS)

    @property
    def programs(self) -> int:
        return pl.cdiv(self.keys, self.of_program)

    @property
    def groups(self) -> int:
        """The one of rows that no group works on counts too."""
        return self.keys // (self.slots + 1)

    def key(self, number):
        """The key of a number in order of slots; those past the last are no keys."""
        groups = jnp.int32(self.groups)
        slot, group = lax.div(number, groups), lax.rem(number, groups)
        return jnp.where(number < self.keys, group * (self.slots + 1) + slot, self.keys)


class _Keys(NamedTuple):
    """One key, or many as arrays: their rows, and how many pieces they are, of how many each."""

    slot: jax.Array
    begin: jax.Array
    end: jax.Array
    pieces: jax.Array
    height: jax.Array


def _keys(sizes: _Sizes, begin, key) -> _Keys:
    """Those past the last key have no rows."""
    first = plgpu.load(begin.at[key], mask=key < sizes.keys, other=sizes.rows)
    end = plgpu.load(begin.at[key + 1], mask=key + 1 < sizes.keys, other=sizes.rows)
    slot = lax.rem(key, jnp.int32(sizes.slots + 1)) - 1
    pieces = jnp.where(slot >= 0, _quotient(end - first, sizes.most), 0)
    height = 8 * _quotient(end - first, 8 * jnp.maximum(pieces, 1))
    return _Keys(slot, first, end, pieces, height)


def _quotient(number, divisor):
    """Rounded up."""
    return lax.div(number + divisor - 1, jnp.broadcast_to(jnp.int32(divisor), number.shape))


def _kernel(sizes: _Sizes, begin, place, run_end, piece_count, piece_row, bare):
    program = pl.program_id(0)
    first = program * sizes.of_program
    number = lax.iota(jnp.int32, pl.next_power_of_2(sizes.keys))
    every = _keys(sizes, begin, sizes.key(number))
    count = jnp.sum(every.pieces, dtype=jnp.int32)
    before = jnp.sum(jnp.where(number < first, every.pieces, 0), dtype=jnp.int32)

    def write(i, before):
        key = sizes.key(first + i)
        its = _keys(sizes, begin, key)
        group = lax.div(key, jnp.int32(sizes.slots + 1))
        word = group * 65536 + its.slot + 1

        def runs(row):
            return (place, row, word), (run_end, row, its.end)

        def rows_of_pieces(piece):
            return ((piece_row, before + piece, its.begin + piece * its.height),)

        _for_each(its.begin, its.end, runs)
        _for_each(jnp.int32(0), its.pieces, rows_of_pieces)
        return before + its.pieces

    lax.fori_loop(0, jnp.minimum(sizes.of_program, sizes.keys - first), write, before)

    @pl.when(program == 0)
    def _count():
        piece_count[0] = count
        bare[0] = jnp.sum(jnp.where(every.slot < 0, every.end - every.begin, 0), dtype=jnp.int32)

    share = pl.cdiv(sizes.rows, sizes.programs)
    begin_rest = jnp.maximum(program * share, count)
    end_rest = jnp.minimum((program + 1) * share, sizes.rows)
    _for_each(begin_rest, end_rest, lambda piece: ((piece_row, piece, 0),))


def _for_each(begin, end, values):
    """Stores values(numbers), (array, index, value) each, for the numbers from begin to end."""

    def block(i, _):
        number = begin + i * ROWS + lax.iota(jnp.int32, ROWS)
        mask = number < end
        for array, index, value in values(number):
            # The interpreter writes what is masked too, as it was: it must not be another's.
            index = jnp.where(mask, index, array.shape[0])
            plgpu.store(array.at[index], jnp.broadcast_to(value, (ROWS,)), mask=mask)

    lax.fori_loop(
        0, lax.div(jnp.maximum(end - begin, 0) + (ROWS - 1), jnp.int32(ROWS)), block, None
    )
