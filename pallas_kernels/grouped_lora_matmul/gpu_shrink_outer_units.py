"""The units of `gpu_shrink_outer`, and the order in which all of a program go through one."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_lora_matmul.gpu_outer_rows import ROWS, over_run, whole_units
from pallas_kernels.grouped_lora_matmul.gpu_rows import Runs

FEATURES = 256  # of one slice
CHUNK = 320  # rows of V that registers hold: there is code for each number of steps
PART = 256  # rows of V of each part, where a bucket has several
WORDS = 8  # of a unit


class Unit(NamedTuple):
    """A part of a bucket.

    Attributes:
      part, parts: its number, and how many the bucket has.
      first, stop: the bucket's runs. begin, end: the rows of the first of them.
    """

    bucket: jax.Array
    part: jax.Array
    parts: jax.Array
    first: jax.Array
    stop: jax.Array
    begin: jax.Array
    end: jax.Array

    def has(self, number):
        """Whether D of a slice, or V of a chunk, of this number is the part's."""
        # Most buckets have one, and few rows would wait for a division.
        return lax.cond(
            self.parts == 1, lambda: True, lambda: lax.rem(number, self.parts) == self.part
        )

    def of_rows(self, begin, end, *, but_all) -> Unit:
        """One of these rows alone, but of all where that is said."""
        alone = self._replace(stop=self.first + 1, begin=begin, end=end)
        return Unit(*(jnp.where(but_all, *both) for both in zip(self, alone, strict=True)))


class Strip(NamedTuple):
    """The features of one term; in a kernel, of the one with a number that is known there.

    Attributes:
      start: of `right`. slices: of `FEATURES` each. before: slices of the terms before.
      left: the first column of its block of 64 in `left`.
    """

    number: jax.Array | int
    start: jax.Array | int
    slices: jax.Array | int
    before: jax.Array | int
    left: jax.Array | int


def strips_of(columns, spans) -> list[Strip]:
    strips, before = [], 0
    for number, ((start, width), (first, _)) in enumerate(zip(spans, columns, strict=True)):
        slices = pl.cdiv(width, FEATURES)
        strips.append(Strip(number, start, slices, before, first // 64 * 64))
        before += slices
    return strips


def units_of(runs: Runs, rows: int, slots: int):
    """int32 [units * WORDS]: the words of each unit, the last of which is how many there are.

    Long ones come first.

    Args:
      rows: of all buckets. slots: that a row may have.
    """
    buckets = runs.first.shape[0]
    last = runs.begin.shape[0] - 1
    has_rows = runs.stop > runs.first
    head, tail = (jnp.clip(its, 0, last) for its in (runs.first, runs.stop - 1))
    begin, end = (jnp.where(has_rows, its[head], 0) for its in (runs.begin, runs.end))
    # At most: others' rows may be between its runs.
    extent = jnp.where(has_rows, runs.end[tail] - begin, 0)
    parts = jnp.where(extent > CHUNK, -(-extent // PART), 1)
    length = jnp.minimum(-(-extent // ROWS), CHUNK // ROWS + 1)
    number = np.arange(buckets, dtype=np.int32)
    earlier = (length[None, :] > length[:, None]) | (
        (length[None, :] == length[:, None]) & (number[None, :] < number[:, None])
    )
    before = jnp.sum(jnp.where(earlier, parts[None, :], 0), axis=1)
    unit = np.arange(buckets + slots * (rows // PART), dtype=np.int32)
    inside = unit[:, None] - before[None, :]
    bucket = jnp.sum(jnp.where((inside >= 0) & (inside < parts[None, :]), number, 0), axis=1)
    words = (bucket, unit - before[bucket], parts[bucket], runs.first[bucket], runs.stop[bucket])
    count = jnp.broadcast_to(jnp.sum(parts), unit.shape)
    words = jnp.stack([*words, begin[bucket], end[bucket], count], axis=1)
    return words.astype(jnp.int32).reshape(-1)


class Order:
    """The order of a unit's stages, which all warpgroups go through.

    For each slice all rows of the bucket, where its D is the unit's, else those of the unit's chunk
    of the first run alone. Then, where a bucket has more runs, for each of the unit's chunks of
    them, all slices.

    Args:
      begins, ends: references to the rows of each run.
    """

    def __init__(self, strips: list[Strip], begins, ends):
        self.strips, self.begins, self.ends = strips, begins, ends
        self.slices = sum(strip.slices for strip in strips)

    def over_rows(self, unit: Unit, visit, state):
        """state = visit(row, kept, state) for each step over the bucket's rows; see `over_run`."""

        def run(number, state):
            return over_run(*self.rows_at(unit, number), visit, state)

        return lax.fori_loop(unit.first, unit.stop, run, state)

    def rows_at(self, unit: Unit, number):
        """Where a run begins and ends: that of the first is known without a trip to memory."""
        return lax.cond(
            number == unit.first,
            lambda: (unit.begin, unit.end),
            lambda: (self.begins[number], self.ends[number]),
        )

    def chunk_of(self, unit: Unit):
        """(row, rows) of the unit's chunk of the first run."""
        row = unit.begin + unit.part * self.rows_of_chunk(unit)
        return row, jnp.clip(unit.end - row, 0, self.rows_of_chunk(unit))

    def rows_of_chunk(self, unit: Unit):
        return jnp.where(unit.parts > 1, PART, CHUNK)

    def over_slices(self, visit, state):
        """state = visit(number, strip, number in the strip, state) for each slice."""

        def one(number, state):
            strip = self.strip_at(lambda its: number >= its.before)
            return visit(number, strip, number - strip.before, state)

        return lax.fori_loop(0, self.slices, one, state)

    def strip_at(self, reached) -> Strip:
        """The last strip that is reached."""
        found = self.strips[0]
        for its in self.strips[1:]:
            is_reached = reached(its)
            found = Strip(*(jnp.where(is_reached, *both) for both in zip(its, found, strict=True)))
        return found

    def over_other_chunks(self, unit: Unit, visit, state):
        """state = visit(row, rows, state) for each of the unit's chunks of other runs."""
        rows = self.rows_of_chunk(unit)

        def run(number, carried):
            before, state = carried
            begin, end = self.begins[number], self.ends[number]
            count = whole_units(end - begin, rows)

            def chunk(i, state):
                row = begin + i * rows
                return lax.cond(
                    unit.has(before + i),
                    lambda state: visit(row, jnp.minimum(end - row, rows), state),
                    lambda state: state,
                    state,
                )

            return before + count, lax.fori_loop(0, count, chunk, state)

        first = whole_units(unit.end - unit.begin, rows)
        return lax.fori_loop(unit.first + 1, unit.stop, run, (first, state))[1]
