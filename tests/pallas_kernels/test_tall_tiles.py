"""Groups whose tiles are tall, of sorted slots: on a GPU, runs that are added in place."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.pallas_kernels.cases import Case, Part, Shape, jitted, make_case

SIZES = (300, 137, 136, 72, 1)  # 129 on average: tiles of up to 136 or 144 rows
ROWS = sum(SIZES)
GROUP = np.repeat(np.arange(len(SIZES)), SIZES)
SLOTS = 8


@functools.cache
def shape_of(rank, parts, implementation):
    shape = Shape(ROWS, len(SIZES), 192, parts, slots=SLOTS, rank=rank, dtype="bfloat16")
    return shape.served_by(implementation)


@functools.cache
def case_of(shape) -> Case:
    """Runs of all lengths, from those of one row to one of a whole tile."""
    rng = np.random.default_rng(shape.rank)
    likely = rng.dirichlet(np.full(SLOTS + 1, 0.7), len(SIZES))
    slots = [rng.choice(SLOTS + 1, size, p=p) - 1 for size, p in zip(SIZES, likely, strict=True)]
    return make_case(shape, SIZES, np.concatenate([np.sort(its) for its in slots]))


def run(case: Case, shape, implementation) -> np.ndarray:
    return np.asarray(jitted(shape.widths, implementation)(*case))


def choose(case: Case, rows) -> Case:
    """The given rows, in order."""
    sizes = np.bincount(GROUP[rows], minlength=len(SIZES)).astype(np.int32)
    return case._replace(x=case.x[rows], row_slots=case.row_slots[rows], group_sizes=sizes)


# Of 96 ranks a run has three low-rank steps, and a stage on a GPU two.
CASES = (16, (Part(256),)), (32, (Part(320),)), (24, (Part(128), Part(128))), (96, (Part(256),))


@pytest.fixture(params=CASES)
def shape(request, implementation):
    return shape_of(*request.param, implementation)


def test_rows_equal_the_same_rows_in_a_small_batch(shape, implementation):
    case = case_of(shape)
    together = run(case, shape, implementation)
    for seed in range(4):
        rows = np.sort(np.random.default_rng(seed).permutation(ROWS)[:24])
        assert np.array_equal(run(choose(case, rows), shape, implementation), together[rows])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_poisoned_factor_stays_in_its_rows(shape, value, implementation):
    case = case_of(shape)
    slot = np.bincount(case.row_slots[case.row_slots >= 0]).argmax()

    def poisoned(pair):
        b = np.array(pair.b)
        b[slot] = value
        return pair._replace(b=b)

    found = run(case._replace(lora=tuple(map(poisoned, case.lora))), shape, implementation)
    its = case.row_slots == slot
    assert np.array_equal(found[~its], run(case, shape, implementation)[~its])
    assert not np.isfinite(found[its]).any()
