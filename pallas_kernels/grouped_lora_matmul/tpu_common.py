"""What the TPU kernels share: dots, loops over windows and steps, operands of many layers, and the
walk over runs and their rank classes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_lora_matmul.tpu_schedule import ROW_ALIGN
from pallas_kernels.grouped_lora_matmul.tpu_tasks import END, GROUP, SLOT
from pallas_kernels.layered import as_stack, is_layered, layer_of

HBM = pl.ANY


def dot(a, b, a_axis: int, b_axis: int):
    """The float32 product of two matrices, summed over the given axes."""
    operand = jnp.promote_types(a.dtype, b.dtype)
    exact = lax.Precision.HIGHEST if operand == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a.astype(operand),
        b.astype(operand),
        (((a_axis,), (b_axis,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def loop(count, body):
    """Calls body(i) for i below count, which may be known only to the kernel."""

    def step(i, carry):
        body(i)
        return carry

    lax.fori_loop(0, count, step, 0)


def blocks(total: int, size: int, body):
    """Calls body(start, size) over [0, total) in order; the last block may be smaller."""
    if total // size > 1:
        loop(total // size, lambda i: body(pl.multiple_of(i * size, size), size))
    elif total >= size:
        body(0, size)
    if total % size:
        body(total - total % size, total % size)


def windows(lo, hi, rows: int, heights, body):
    """Covers rows [lo, hi) of a tile of `rows` with windows that do not overlap.

    A window starts at a multiple of 16 rows. As many of the tallest as there is need for, then the
    lowest one that covers the rest; body(first_row, height) is compiled once for each height.
    """
    tallest = heights[-1]
    base = lo // ROW_ALIGN * ROW_ALIGN
    span = jnp.where(hi > lo, hi - base, 0)
    whole = span // tallest
    rest = span - whole * tallest
    if len(heights) > 1:
        whole += (rest > heights[-2]).astype(jnp.int32)
        rest = jnp.where(rest > heights[-2], 0, rest)
    else:
        whole, rest = whole + (rest > 0), 0
    rest_height, lower = 0, 0
    for height in heights[:-1]:
        rest_height = jnp.where((rest > lower) & (rest <= height), height, rest_height)
        lower = height
    # Windows that would end past the tile all start earlier instead.
    first = jnp.minimum(base, rows - whole * tallest - rest_height)
    loop(whole, lambda i: body(pl.multiple_of(first + i * tallest, ROW_ALIGN), tallest))
    last = pl.multiple_of(first + whole * tallest, ROW_ALIGN)
    for height in heights[:-1]:
        pl.when(rest_height == height)(lambda height=height: body(last, height))


def rows_within(first, shape, lo, hi):
    """Whether each row of a block of this shape, which starts at row `first`, is in [lo, hi)."""
    row = first + lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= lo) & (row < hi)


class Runs:
    """The runs with an adapter among rows [lo, hi) of a tile, and the copies of their factors.

    As many runs as there are buffers are fetched ahead.
    """

    def __init__(self, table, lo, hi, copy, buffers: int):
        """table: the tile's SMEM rows of `row_runs`. copy(slot, group, buffer, act) calls act with
        each copy of a run's factors."""
        self.table, self.lo, self.hi = table, lo, hi
        self.copy, self.buffers = copy, buffers

    def fetch(self):
        """Starts the first copies; returns what `each` needs."""
        row = self._adapted(self.lo)
        for buffer in range(self.buffers):
            self._start(row, buffer)
            row = self._after(row)
        return row

    def each(self, ahead, body):
        """Calls body(slot, lo, hi, buffer) for each run, in order of rows."""

        def step(state):
            row, ahead, buffer = state
            slot = self.table[SLOT, row]
            self._do(row, buffer, lambda copy: copy.wait())
            body(slot, row, jnp.minimum(self.table[END, row], self.hi), buffer)
            self._start(ahead, buffer)
            following = jnp.where(buffer == self.buffers - 1, 0, buffer + 1)
            return self._after(row), self._after(ahead), following

        start = (self._adapted(self.lo), ahead, jnp.int32(0))
        lax.while_loop(lambda state: state[0] < self.hi, step, start)

    def _last(self, row):
        return jnp.minimum(row, self.table.shape[1] - 1)

    def _adapted(self, row):
        """The first row with an adapter from the first row of a run on; hi or more if none."""
        base_only = self.table[SLOT, self._last(row)] < 0
        return jnp.where(base_only, self.table[END, self._last(row)], row)

    def _after(self, row):
        return self._adapted(jnp.maximum(row, self.table[END, self._last(row)]))

    def _start(self, row, buffer):
        @pl.when(row < self.hi)
        def _():
            self._do(row, buffer, lambda copy: copy.start())

    def _do(self, row, buffer, act):
        row = self._last(row)
        self.copy(self.table[SLOT, row], self.table[GROUP, row], buffer, act)


def with_class(slot, firsts, factors, body):
    """Calls body(terms, slot in their factors) for the rank class that a slot is of.

    Slots count through all classes; nothing is compared where there is one.

    Args:
      firsts: the number of each term's first slot; terms of one class have the same.
      factors: one [S, ...] for each term, S slots of that class.
    """
    for first in dict.fromkeys(firsts):
        terms = [i for i, its in enumerate(firsts) if its == first]
        if len(terms) == len(firsts):
            body(terms, slot)
            return
        inside = (slot >= first) & (slot < first + factors[terms[0]].shape[0])
        pl.when(inside)(functools.partial(body, terms, slot - first))


def factor_of(factor, slot, group):
    """One slot's and group's `[R, width]` of a factor `[S, G or 1, R, width]`."""
    return factor.at[slot, 0 if factor.shape[1] == 1 else group]


def stacks_of(*arrays):
    """What a kernel gets of arrays that may be `Layered`: int32 [1], the layer's number, for its
    scalar memory; and a stack for each."""
    layer = layer_of(*arrays)
    number = jnp.zeros(1, jnp.int32) if layer is None else layer
    return number, tuple(map(as_stack, arrays))


def part_of(stack, layer):
    """The layer's part of a reference to a stack; of a stack of one, that one."""
    return stack.at[layer[0] if stack.shape[0] > 1 else 0]


def nbytes(*arrays) -> int:
    """Of what is read: of one that is `Layered`, the part."""
    leaves = jax.tree.leaves(arrays, is_leaf=is_layered)
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in leaves)


def last_or_whole(is_last, rest: int, whole: int, body):
    """body(rest) or body(whole), once if they are equal or is_last is static."""
    if rest == whole:
        body(whole)
    elif isinstance(is_last, bool):
        body(rest if is_last else whole)
    else:
        pl.when(is_last)(lambda: body(rest))
        pl.when(jnp.logical_not(is_last))(lambda: body(whole))
