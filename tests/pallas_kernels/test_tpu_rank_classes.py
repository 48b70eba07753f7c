"""Rank classes on TPUs: a row's bits are those in a bank of one class whose ranks are padded.

As the dots of a CPU choose their code by their sizes, windows have one height, as in
`test_tpu_exactness.py`, and no rank is a power of two from 32 on.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pallas_kernels import Lora
from pallas_kernels.grouped_lora_matmul import mosaic_tpu
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.tpu_schedule import ProductSchedule
from tests.pallas_kernels import tpu_interpreter
from tests.pallas_kernels.class_cases import assert_same_products
from tests.pallas_kernels.product_cases import Term
from tests.pallas_kernels.tpu_cases import ProductCase, assert_close
from tests.pallas_kernels.tpu_interpreter import jitted

pytestmark = pytest.mark.interpreter


@dataclasses.dataclass(frozen=True)
class RankClass:
    first: int
    count: int
    rank: int

    @property
    def slots(self):
        return slice(self.first, self.first + self.count)

    def has(self, slots):
        return (slots >= self.first) & (slots < self.first + self.count)


CLASSES = (RankClass(0, 3, 8), RankClass(3, 2, 48))
COUNT, RANK = 5, 48
SIZES, ROWS = (11, 0, 9), 24  # the last 4 rows are in no group
SLOTS = np.array([-1, 0, 3, 3, 1, 4, 2, -1, 0, 4], np.int32)[np.arange(ROWS) * 7 // 16 % 10]
IN_A_GROUP = np.arange(ROWS) < sum(SIZES)


def without_padding(factors):
    """Zeros past each slot's own rank."""
    factors = tuple(factor.copy() for factor in factors)
    for factor in factors:
        for its in CLASSES:
            factor[its.slots, :, its.rank :] = 0
    return factors


def rank_of_row():
    return sum(np.where(its.has(SLOTS), its.rank, 0) for its in CLASSES)


def u_of_bank(u):
    """u as `shrink` gives it with padded ranks: zeros past a row's own."""
    past = np.arange(RANK) >= rank_of_row()[:, None]
    return tuple(np.where(past & (SLOTS >= 0)[:, None], 0, low).astype(low.dtype) for low in u)


def of_classes(factors):
    """The factors of each class, part by part."""
    return tuple(factor[its.slots, :, : its.rank] for its in CLASSES for factor in factors)


def u_of_classes(u):
    """Those of each class; NaN in the rows of others."""
    return tuple(
        np.where(its.has(SLOTS)[:, None], low[:, : its.rank], np.nan).astype(low.dtype)
        for its in CLASSES
        for low in u
    )


def firsts(parts: int):
    return tuple(its.first for its in CLASSES for _ in range(parts))


def schedule(block_n, piece, **changes):
    small = dict(n_tiles=1, pieces=1, ring=2, run_buffers=2, cores=1)
    tiles = small | changes | dict(block_n=block_n, piece=piece)
    return ProductSchedule(16, (16,), (16,), **tiles)


PRODUCTS = {
    "parts": ProductCase(
        ROWS,
        40,
        48,
        (Term(0, 16, RANK), Term(16, 32, RANK, shared=True)),
        slots=COUNT,
        schedule=schedule(48, 48),
    ),
    "backward": ProductCase(
        ROWS,
        40,
        48,
        (Term(0, 48, RANK), Term(0, 48, RANK)),
        contract=1,
        slots=COUNT,
        schedule=schedule(48, 40),
    ),
    "gated, column tiles, two cores, bf16": ProductCase(
        ROWS,
        48,
        2 * 480,
        (Term(0, 480, RANK), Term(480, 480, RANK)),
        gate=Gate(),
        dtype="bfloat16",
        slots=COUNT,
        schedule=schedule(256, 128, n_tiles=2, pieces=2, ring=3, cores=2),
    ),
}


def arguments_of_bank(case: ProductCase):
    x, w, sizes, slots, u, factors = case.arguments(SIZES, SLOTS)
    return x, w, sizes, slots, u_of_bank(u), without_padding(factors)


def run_classes(case: ProductCase, arguments):
    """The product of a bank of one class, with rank classes."""
    *rest, u, factors = arguments
    parts = len(case.terms)
    static = case.static | dict(starts=case.static["starts"] * 2, firsts=firsts(parts))
    product = jitted("product", case.schedule, case.groups, **static)
    return product(*rest, u_of_classes(u), of_classes(factors))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "parts" else pytest.mark.slow) for name in PRODUCTS],
)
def test_product(name):
    case = PRODUCTS[name]
    arguments = arguments_of_bank(case)
    expected = case.run(*arguments, races=False)
    found = run_classes(case, arguments)
    assert_close(found, case.expect(*arguments), case.dtype)
    assert np.array_equal(found, expected) and not found[~IN_A_GROUP].any()


@pytest.mark.parametrize("poisoned", CLASSES, ids=lambda its: f"rank {its.rank}")
def test_a_poisoned_class_stays_in_its_rows(poisoned):
    case = PRODUCTS["parts"]
    x, w, sizes, slots, u, factors = arguments_of_bank(case)
    expected = run_classes(case, (x, w, sizes, slots, u, factors))
    its = poisoned.has(SLOTS)
    x, u, factors = x.copy(), tuple(map(np.copy, u)), tuple(map(np.copy, factors))
    for array in (x, *u):
        array[its] = np.nan
    for factor in factors:
        factor[poisoned.slots] = np.nan
    found = run_classes(case, (x, w, sizes, slots, u, factors))
    assert np.array_equal(found[~its], expected[~its])
    assert np.isnan(found[its & IN_A_GROUP]).all()


def shrink_arguments():
    """x with two parts; the second's factor and scaling are shared by all groups."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 24 + 130)).astype(np.float32)
    x[~IN_A_GROUP] = np.nan
    shapes = (COUNT, 3, RANK, 24), (COUNT, 1, RANK, 130)
    factors = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    scaling = rng.uniform(0.5, 2, (COUNT, 3)).astype(np.float32)
    return x, without_padding(factors), (scaling, scaling[:, :1])


def shrink_classes(x, factors, scalings):
    """u of each class and part."""
    more = [np.pad(scaling, ((0, 2), (0, 0))) for scaling in scalings]  # of slots to come
    of_class = tuple(scaling[its.first :] for its in CLASSES for scaling in more)
    shrink = jitted("shrink", starts=(0, 24) * 2, firsts=firsts(2))
    sizes = np.array(SIZES, np.int32)
    return shrink(x, sizes, SLOTS, of_classes(factors), scalings=of_class)


def test_shrink():
    x, factors, scalings = shrink_arguments()
    padded = jitted("shrink", starts=(0, 24), firsts=(0, 0))
    expected = padded(x, np.array(SIZES, np.int32), SLOTS, factors, scalings=scalings, races=False)
    found = shrink_classes(x, factors, scalings)
    terms = [(its, u) for its in CLASSES for u in expected]
    for u, (its, of_bank) in zip(found, terms, strict=True):
        rows = its.has(SLOTS) & IN_A_GROUP
        assert u.shape == (ROWS, its.rank)
        assert_same_products(u[rows], of_bank[rows, : its.rank])
        assert not of_bank[rows, its.rank :].any()


@pytest.mark.slow
@pytest.mark.parametrize("its", CLASSES, ids=lambda its: f"rank {its.rank}")
def test_a_call_of_one_class(its):
    """Rows of other slots are rows without an adapter: of lower numbers and of higher ones."""
    case, bank = PRODUCTS["parts"], PRODUCTS["parts"].arguments(SIZES, SLOTS)
    *rest, slots, u, factors = bank
    factors = tuple(factor[its.slots] for factor in factors)
    product = jitted("product", case.schedule, **case.static | dict(firsts=(its.first,) * 2))
    found = product(*rest, slots, u, factors)
    alone = jitted("product", case.schedule, **case.static)
    expected = alone(*rest, np.where(its.has(slots), slots - its.first, -1), u, factors)
    assert np.array_equal(found, expected)
    x, (factor, _), (scaling, _) = shrink_arguments()
    sizes, factors = np.array(SIZES, np.int32), (factor[its.slots],)
    shrink = jitted("shrink", starts=(0,), firsts=(its.first,))
    (u,) = shrink(x, sizes, SLOTS, factors, scalings=(scaling[its.slots],))
    (expected,) = tpu_interpreter.shrink(
        x, SIZES, SLOTS, factors, (0,), (scaling[its.slots],), (its.first,)
    )
    rows = its.has(SLOTS) & IN_A_GROUP
    assert_close(u[rows], expected[rows], "float32")


def test_no_other_class_poisons_u_or_a_gradient():
    x, factors, scalings = shrink_arguments()
    expected, (sums, _) = shrink_classes(x, factors, scalings), outer_classes(x)
    low, high = CLASSES
    x[high.has(SLOTS)] = np.inf
    for array in (*factors, *scalings):
        array[high.slots] = np.nan
    found, (found_sums, _) = shrink_classes(x, factors, scalings), outer_classes(x)
    rows = low.has(SLOTS) & IN_A_GROUP
    assert all(
        np.array_equal(u[rows], v[rows]) for u, v in zip(found[:2], expected[:2], strict=True)
    )
    assert np.array_equal(found_sums, sums)


def lefts_of_bank():
    left = np.random.default_rng(1).standard_normal((ROWS, RANK)).astype(np.float32)
    return u_of_bank((left,))


def outer_classes(right):
    """The sums of each class."""
    sizes, found = np.array(SIZES, np.int32), []
    for its, left in zip(CLASSES, u_of_classes(lefts_of_bank()), strict=True):
        static = dict(ranks=(its.rank,), start=0, width=40, first=its.first)
        outer = jitted("outer", shape=(its.count, 3), dtype="float32", **static)
        found += outer((left,), right, sizes, SLOTS)
    return found


def test_outer():
    right = np.random.default_rng(2).standard_normal((ROWS, 154)).astype(np.float32)
    static = dict(ranks=(RANK,), start=0, width=40, first=0, shape=(COUNT, 3), dtype="float32")
    (expected,) = jitted("outer", **static)(
        lefts_of_bank(), right, np.array(SIZES, np.int32), SLOTS, races=False
    )
    for its, sums in zip(CLASSES, outer_classes(right), strict=True):
        assert_same_products(sums, expected[its.slots, :, : its.rank])


def test_check_takes_classes():
    """And adds them up only where they share memory: the sums of the gradients are one class's."""

    def zeros(*shape):
        return np.broadcast_to(np.float32(0), shape)

    def pair(slots, rank):
        return Lora(zeros(slots, 1, rank, 16), zeros(slots, 1, rank, 8), zeros(slots, 1))

    x, w = zeros(5, 16), zeros(1, 8, 16)
    left, right = (pair(1024, 40), pair(512, 80)), (pair(1024, 8), pair(512, 8))
    assert mosaic_tpu.check(x, zeros(1, 24, 16), (left, None, right), (8, 8, 8)) is None
    with pytest.raises(NotImplementedError, match=r"ranks=\[40, 120\]"):
        mosaic_tpu.check(x, w, ((pair(1024, 40), pair(1024, 120)),), (8,))
