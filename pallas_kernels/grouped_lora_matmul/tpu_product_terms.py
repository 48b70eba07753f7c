"""The low-rank terms of a TPU product: the factors of a run, and what they add."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_lora_matmul.tpu_common import (
    blocks,
    dot,
    last_or_whole,
    rows_within,
    windows,
)
from pallas_kernels.grouped_lora_matmul.tpu_product_layout import COLUMNS, ProductLayout, Term
from pallas_kernels.grouped_lora_matmul.tpu_schedule import LANES, ProductSchedule


def _needed(s: ProductSchedule, term: Term, column_tile):
    """Whether a column tile needs a term's factor."""
    start = column_tile * s.block_n - term.start
    return s.n_tiles == 1 or ((start >= 0) & (start < term.width))


def copy_factor(layout: ProductLayout, term: Term, column_tile, source, target, semaphore, act):
    """Acts on the copy of the columns of a factor that a column tile needs, if it needs any."""
    s = layout.schedule
    if s.n_tiles == 1:
        act(pltpu.make_async_copy(source, target, semaphore))
        return

    def copy(columns):
        part, place = source, target
        if columns < term.width:
            start = pl.multiple_of(column_tile * s.block_n - term.start, LANES)
            part = source.at[:, pl.ds(start, columns)]
        if columns < target.shape[1]:
            place = target.at[:, pl.ds(0, columns)]
        act(pltpu.make_async_copy(part, place, semaphore))

    width = min(s.block_n, term.width)
    last = column_tile == s.n_tiles - 1

    @pl.when(_needed(s, term, column_tile))
    def _():
        last_or_whole(last, term.width % width or width, width, copy)


def add_run(layout: ProductLayout, terms, acc, u, run_ring, column_tile, lo, hi, buffer):
    """Adds those terms to the rows of a run."""
    s = layout.schedule
    for i in terms:
        term = layout.terms[i]
        needed = _needed(s, term, column_tile)
        add = functools.partial(
            _add_term, layout, term, acc, u[i], run_ring[i], column_tile, lo, hi, buffer
        )
        if needed is True:
            add()
        else:
            pl.when(needed)(add)


def _add_term(layout: ProductLayout, term: Term, acc, u, ring, column_tile, lo, hi, buffer):
    """acc += u·B on the rows [lo, hi) of a run."""
    s = layout.schedule
    first_column = term.start if s.n_tiles == 1 else 0

    def window(first, height):
        rows = pl.ds(first, height)
        left = u[rows, :]

        def column(c, width):
            at = acc.at[term.half, rows, pl.ds(first_column + c, width)]
            delta = dot(left, ring[buffer, :, pl.ds(c, width)], 1, 0)
            keep = rows_within(first, (height, width), lo, hi)
            if term.kept is not None:
                place = term.start if s.n_tiles == 1 else column_tile * s.block_n
                index = place + c + lax.broadcasted_iota(jnp.int32, (height, width), 1)
                keep &= (index >= term.kept[0]) & (index < term.kept[1])
            at[...] = jnp.where(keep, at[...] + delta, at[...])

        blocks(ring.shape[2], COLUMNS, column)

    windows(lo, hi, s.block_m, s.run_heights, window)
