"""On TPUs a row's bits depend on the row, its group and its slot; nothing crosses slots.

The interpreter's dots choose their code by their number of rows, as any dot on a CPU, so these
tests give all windows one height. On a TPU the rows of the MXU do not know of each other.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_lora_matmul.gate import Gate, gated_columns
from pallas_kernels.grouped_lora_matmul.tpu_schedule import ProductSchedule, tile_rows
from tests.pallas_kernels.product_cases import Term
from tests.pallas_kernels.tpu_cases import ProductCase
from tests.pallas_kernels.tpu_interpreter import jitted

pytestmark = pytest.mark.interpreter

SIZES, ROWS = (17, 9, 22), 48
GROUP = np.repeat(np.arange(3), SIZES)
SLOTS = np.array([-1, 0, 2, 2, 3, 1, 2, -1], np.int32)[np.arange(ROWS) * 5 // 16 % 8]


def schedule(block_m=32, **changes):
    """The one there is for small shapes, with windows of one height."""
    small = dict(n_tiles=1, pieces=1, ring=2, run_buffers=4, cores=1)
    return ProductSchedule(block_m, (16,), (16,), **(small | changes))


FORWARD = ProductCase(
    ROWS,
    40,
    48,
    (Term(0, 16), Term(16, 32, shared=True)),
    schedule=schedule(block_n=48, piece=48),
)
BACKWARD = ProductCase(
    ROWS,
    40,
    48,
    (Term(0, 48), Term(0, 48)),
    contract=1,
    schedule=schedule(block_n=48, piece=40),
)


def fewer(case, rows):
    """The same product of so many rows, in tiles of as many as needed."""
    block_m = tile_rows(rows)
    tiles = dataclasses.replace(case.schedule, block_m=block_m)
    return dataclasses.replace(case, rows=rows, schedule=tiles)


def choose(arguments, rows):
    x, w, _, slots, u, factors = arguments
    sizes = np.bincount(GROUP[rows], minlength=3).astype(np.int32)
    return x[rows], w, sizes, slots[rows], tuple(low[rows] for low in u), factors


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(FORWARD, id="forward"),
        pytest.param(BACKWARD, id="backward", marks=pytest.mark.slow),
    ],
)
def test_a_row_alone_equals_the_row_in_a_batch(case):
    arguments = case.arguments(SIZES, SLOTS)
    expected = case.run(*arguments, races=False)
    rng = np.random.default_rng(2)
    one = fewer(case, 1)
    for row in (0, 16, 17, 47):
        found = one.run(*choose(arguments, np.array([row])), races=False)
        assert np.array_equal(found[0], expected[row])
    rows = rng.permutation(ROWS)  # another order, other neighbours, other tiles
    rows = rows[np.argsort(GROUP[rows], kind="stable")]
    found = case.run(*choose(arguments, rows), races=False)
    assert np.array_equal(found, expected[rows])


@pytest.mark.slow
@pytest.mark.parametrize("contract", [2, 1])
@pytest.mark.parametrize("count", [2, 16, 17, 47])
def test_some_rows_equal_the_rows_in_a_batch(contract, count):
    case = {2: FORWARD, 1: BACKWARD}[contract]
    arguments = case.arguments(SIZES, SLOTS)
    expected = case.run(*arguments, races=False)
    rows = np.sort(np.random.default_rng(count).permutation(ROWS)[:count])
    found = fewer(case, count).run(*choose(arguments, rows), races=False)
    assert np.array_equal(found, expected[rows])


ONE_BY_ONE = dict(n_tiles=3, block_n=128, piece=128)
PIECES = dict(block_n=384, piece=128, pieces=3, ring=4)
BACKWARD_PIECES = dict(n_tiles=2, block_n=256, piece=512, pieces=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "contract, first, others",
    [
        (2, ONE_BY_ONE, [PIECES, PIECES | dict(ring=6, block_m=16), ONE_BY_ONE | dict(block_m=64)]),
        (
            1,
            BACKWARD_PIECES | dict(ring=6),
            [BACKWARD_PIECES | dict(ring=4, cores=2), BACKWARD_PIECES | dict(ring=5, block_m=16)],
        ),
    ],
    ids=["forward", "backward"],
)
def test_schedules_give_the_same_bits(contract, first, others):
    """Row tiles, column tiles, pieces, rings and cores; the order of the sum over K is one."""
    case = ProductCase(ROWS, 1344, 384, (Term(0, 384),), contract=contract)
    arguments = case.arguments(SIZES, SLOTS)
    expected, *found = (
        dataclasses.replace(case, schedule=schedule(**cut)).run(*arguments, races=False)
        for cut in (first, *others)
    )
    assert all(np.array_equal(y, expected) for y in found)


def test_a_gate_rounds_as_in_training():
    """Training keeps gate and up in x's dtype for the gradient, and gates what it keeps."""
    tiles = schedule(block_n=64, piece=64)
    case = ProductCase(ROWS, 48, 64, dtype="bfloat16", schedule=tiles)
    gated = dataclasses.replace(case, gate=Gate(), schedule=schedule(block_n=32, piece=32))
    arguments = case.arguments(SIZES, SLOTS)
    expected = gated_columns(jnp.asarray(case.run(*arguments, races=False)), Gate())
    assert np.array_equal(gated.run(*arguments, races=False), expected)


@pytest.mark.parametrize(
    "case, value",
    [
        pytest.param(FORWARD, np.nan, id="forward"),
        pytest.param(FORWARD, np.inf, id="forward-inf", marks=pytest.mark.slow),
        pytest.param(BACKWARD, np.nan, id="backward", marks=pytest.mark.slow),
        pytest.param(BACKWARD, np.inf, id="backward-inf", marks=pytest.mark.slow),
    ],
)
def test_a_poisoned_slot_stays_in_its_rows(case, value):
    arguments = case.arguments(SIZES, SLOTS)
    expected = case.run(*arguments, races=False)
    x, w, sizes, slots, u, factors = arguments
    x, factors = x.copy(), tuple(factor.copy() for factor in factors)
    poisoned = slots == 2
    x[poisoned] = value
    for factor in factors:
        factor[2] = value
    found = case.run(x, w, sizes, slots, u, factors, races=False)
    assert np.array_equal(found[~poisoned], expected[~poisoned])
    assert not np.isfinite(found[poisoned]).any()


def test_a_poisoned_slot_reaches_no_other_low_rank_input_or_gradient():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ROWS, 40)).astype(np.float32)
    factor = rng.standard_normal((4, 3, 4, 40)).astype(np.float32)
    left = rng.standard_normal((ROWS, 4)).astype(np.float32)
    sizes = np.array(SIZES, np.int32)
    shrink = jitted("shrink", starts=(0,), scalings=(None,), firsts=(0,))
    shape = dict(start=0, width=40, first=0, shape=(4, 3))
    outer = jitted("outer", ranks=(4,), dtype="float32", **shape)
    (u,) = shrink(x, sizes, SLOTS, (factor,), races=False)
    (sums,) = outer((left,), x, sizes, SLOTS, races=False)
    x[SLOTS == 2] = np.nan
    left[SLOTS == 2] = np.inf
    factor[2] = np.nan
    (found,) = shrink(x, sizes, SLOTS, (factor,), races=False)
    others = (SLOTS >= 0) & (SLOTS != 2)
    assert np.array_equal(found[others], u[others])
    (found,) = outer((left,), x, sizes, SLOTS, races=False)
    assert np.array_equal(found[[0, 1, 3]], sums[[0, 1, 3]])


def test_rows_past_the_end_and_a_poisoned_group():
    case = FORWARD
    x, w, _, slots, u, factors = case.arguments(SIZES, SLOTS)
    expected = case.run(x, w, np.array(SIZES, np.int32), slots, u, factors, races=False)
    w = w.copy()
    w[2] = np.nan
    x = x.copy()
    x[33:] = np.inf
    found = case.run(x, w, np.array([17, 9, 7], np.int32), slots, u, factors, races=False)
    assert np.array_equal(found[:26], expected[:26])
    assert np.isnan(found[26:33]).all() and not found[33:].any()
