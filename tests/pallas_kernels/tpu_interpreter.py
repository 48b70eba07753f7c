"""The TPU kernels on a CPU: Pallas's TPU interpreter, and the interface's definition in NumPy.

The interpreter checks every read and write for races and out-of-bounds indices, and fills memory
that nobody wrote with NaN.
"""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_lora_matmul import mosaic_tpu, tpu_schedule
from pallas_kernels.grouped_lora_matmul.tpu_schedule import ProductSchedule
from tests.pallas_kernels.plain_callbacks import plain_callbacks


@contextlib.contextmanager
def interpreter(schedule: ProductSchedule | None = None, races: bool = True):
    """Runs kernels in the interpreter; products with the given schedule. Fails if they race."""
    params = pltpu.InterpretParams(detect_races=races, uninitialized_memory="nan")
    scheduled = contextlib.nullcontext()
    if schedule is not None:
        scheduled = mock.patch.object(tpu_schedule, "product_schedule", lambda *_: schedule)
    with scheduled, plain_callbacks(), pltpu.force_tpu_interpret_mode(params):
        yield
    found = interpret_pallas_call.races
    assert not (races and found is not None and found.races_found)


@functools.cache
def jitted(name: str, schedule: ProductSchedule | None = None, groups: int | None = None, **static):
    """A function of `mosaic_tpu`, compiled for the interpreter, on NumPy arrays.

    It takes group sizes and slots in place of tables; `groups` is needed when sizes are None.
    """
    function = _outer if name == "outer" else getattr(mosaic_tpu, name)
    function = functools.partial(function, **static)
    before = 1 if name == "shrink" else 2  # arguments before the tables
    after = {"product": ("u", "factors"), "shrink": ("factors",), "outer": ()}[name]

    @jax.jit
    def compiled(*arguments, **arrays):
        sizes, slots = arguments[before : before + 2]
        tables = mosaic_tpu.tables(sizes, slots, groups or len(sizes))
        arrays |= zip(after, arguments[before + 2 :], strict=True)
        return function(*arguments[:before], tables=tables, **arrays)

    def run(*arguments, races: bool = True, **arrays):
        with interpreter(schedule, races):
            return jax.tree.map(np.asarray, compiled(*arguments, **arrays))

    return run


def _outer(lefts, right, *, ranks, start, width, **rest):
    """`mosaic_tpu.outer` of one span, with ranks on their own: they are static."""
    lefts = tuple(zip(lefts, ranks, strict=True))
    return mosaic_tpu.outer(lefts, right, ((start, width),) * len(lefts), **rest)


def groups_of_rows(group_sizes, rows: int):
    """The group of each row; -1 past the last group."""
    group = np.repeat(np.arange(len(group_sizes)), group_sizes)
    return np.pad(group, (0, rows - len(group)), constant_values=-1)


def _of(array, slot, group):
    return array[slot, group if array.shape[1] > 1 else 0].astype(np.float64)


def _place(row_slot, factor, first):
    """A slot's place in a factor whose slots begin at number `first`; -1 if it is not there."""
    return row_slot - first if first <= row_slot < first + factor.shape[0] else -1


def product(
    x,
    w,
    group_sizes,
    row_slots,
    u,
    factors,
    starts,
    firsts=None,
    *,
    contract,
    gate=None,
    bias=None,
):
    """`product` of the backend interface in float64; firsts of None are zeros."""
    firsts = firsts or (0,) * len(factors)
    y = np.zeros((len(x), w.shape[3 - contract]))
    for row, group in enumerate(groups_of_rows(group_sizes, len(x))):
        if group < 0:
            continue
        weight = w[group].astype(np.float64)
        y[row] = x[row].astype(np.float64) @ (weight.T if contract == 2 else weight)
        for low, factor, start, first in zip(u, factors, starts, firsts, strict=True):
            slot = _place(row_slots[row], factor, first)
            if slot >= 0:
                delta = low[row].astype(np.float64) @ _of(factor, slot, group)
                y[row, start : start + factor.shape[3]] += delta
        if bias is not None:
            y[row] += bias[group].astype(np.float64)
    if gate is None:
        return y
    left, right = np.split(y, 2, axis=1)
    if gate.limit is not None:
        left, right = np.minimum(left, gate.limit), np.clip(right, -gate.limit, gate.limit)
    return left / (1 + np.exp(-gate.alpha * left)) * (right + gate.up_offset)


def shrink(x, group_sizes, row_slots, factors, starts, scalings, firsts=None):
    """`shrink` of the backend interface in float64; zeros where the interface says anything."""
    firsts = firsts or (0,) * len(factors)
    found = [np.zeros((len(x), factor.shape[2])) for factor in factors]
    for row, group in enumerate(groups_of_rows(group_sizes, len(x))):
        terms = zip(found, factors, starts, scalings, firsts, strict=True)
        for u, factor, start, scaling, first in terms:
            slot = _place(row_slots[row], factor, first)
            if group < 0 or slot < 0:
                continue
            part = x[row, start : start + factor.shape[3]].astype(np.float64)
            scale = 1.0 if scaling is None else _of(scaling, slot, group)
            u[row] = scale * (_of(factor, slot, group) @ part)
    return tuple(found)


def outer(left, right, group_sizes, row_slots, *, start, width, shape, first=0):
    """`outer` of the backend interface in float64."""
    right = right[:, start : start + width]
    sums = np.zeros((*shape, left.shape[1], width))
    for row, group in enumerate(groups_of_rows(group_sizes, len(left))):
        slot = row_slots[row] - first
        if group >= 0 and 0 <= slot < shape[0]:
            bucket = slot, group if shape[1] > 1 else 0
            sums[bucket] += np.outer(left[row].astype(np.float64), right[row].astype(np.float64))
    return sums
