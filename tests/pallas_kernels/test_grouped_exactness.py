"""A row's bits depend on the row, its group and its slot alone; so do those of its gradient."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import grouped_lora_matmul
from tests.pallas_kernels.cases import Case, Part, Shape, jitted, make_case

SIZES = (110, 90, 100)  # of the groups of the large batch
ROWS = sum(SIZES)
GROUP = np.repeat(np.arange(3), SIZES)
DTYPES = ("float32", "bfloat16")
QUICK = [("float32", 1), ("float32", 257), ("bfloat16", 33)]  # dtype and rows: each compiles


def shape_of(dtype, implementation):
    return Shape(ROWS, 3, 17, (Part(18),), rank=2, dtype=dtype).served_by(implementation)


@functools.cache
def large_case(shape):
    slots = np.random.default_rng(1).integers(-1, 4, ROWS)
    return make_case(shape, SIZES, slots)


@functools.cache
def compiled(widths, implementation):
    def run(case, dy):
        def forward(x):
            return grouped_lora_matmul(x, *case[1:], parts=widths, implementation=implementation)

        y, pullback = jax.vjp(forward, case.x)
        return y, pullback(dy)[0]

    return jax.jit(run)


def run(case: Case, implementation: str):
    """y and dx; a row's dy is made from its x, so it goes with the row."""
    widths = tuple(pair.b.shape[-1] for pair in case.lora)
    dy = np.resize(case.x.T, (sum(widths), len(case.x))).T
    return tuple(
        np.asarray(v) for v in compiled(widths, implementation)(case, np.ascontiguousarray(dy))
    )


def choose(case: Case, rows) -> Case:
    """The given rows, which are in order of their groups."""
    sizes = np.bincount(GROUP[rows], minlength=3).astype(np.int32)
    return case._replace(x=case.x[rows], row_slots=case.row_slots[rows], group_sizes=sizes)


def random_rows(count, seed=0):
    """`count` different rows, groups in order, any order inside them."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(ROWS)[:count]
    return rows[np.argsort(GROUP[rows], kind="stable")]


def assert_rows_equal(found, expected, rows, at=slice(None)):
    for value, reference in zip(found, expected, strict=True):
        assert np.array_equal(value[at], reference[rows])


@pytest.mark.parametrize(
    "dtype, count",
    QUICK
    + [
        pytest.param(d, m, marks=pytest.mark.slow)
        for d in DTYPES
        for m in (1, 2, 7, 8, 31, 32, 33, 64, 100, 256, 257)
        if (d, m) not in QUICK
    ],
)
def test_the_number_of_rows_does_not_matter(dtype, count, implementation):
    case = large_case(shape_of(dtype, implementation))
    for seed in range(5):
        rows = random_rows(count, seed)
        assert_rows_equal(run(choose(case, rows), implementation), run(case, implementation), rows)


def test_the_number_of_rows_does_not_matter_to_sums_that_stay_float32(implementation):
    shape = Shape(ROWS, 3, 530, (Part(70),), rank=5, dtype="bfloat16").served_by(implementation)
    case, product = large_case(shape), jitted(shape.widths, implementation, np.float32)
    together = np.asarray(product(*case))
    for count in (1, 100):
        rows = random_rows(count)
        assert np.array_equal(product(*choose(case, rows)), together[rows])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 16, 48, 129, 299])
def test_the_number_of_rows_does_not_matter_to_wide_products(dtype, count, implementation):
    shape = Shape(ROWS, 3, 1100, (Part(517), Part(64, shared_a=True)), rank=20, dtype=dtype)
    case = large_case(shape.served_by(implementation))
    rows = random_rows(count)
    assert_rows_equal(run(choose(case, rows), implementation), run(case, implementation), rows)


@pytest.mark.parametrize("dtype", DTYPES)
class TestAtOneShape:
    """Changes that need no other compilation."""

    def test_the_place_in_the_group(self, dtype, implementation):
        case = large_case(shape_of(dtype, implementation))
        for seed in range(5):
            rows = random_rows(ROWS, seed)
            assert_rows_equal(
                run(choose(case, rows), implementation), run(case, implementation), rows
            )

    def test_the_values_of_the_neighbours(self, dtype, implementation):
        case = large_case(shape_of(dtype, implementation))
        kept = np.random.default_rng(2).random(ROWS) < 0.2
        other = make_case(shape_of(dtype, implementation), SIZES, case.row_slots, seed=9)
        x = np.where(kept[:, None], case.x, 1000 * other.x)
        assert_rows_equal(
            run(case._replace(x=x), implementation), run(case, implementation), kept, kept
        )

    @pytest.mark.parametrize("slot", [-1, 2, "random"])
    def test_the_slots_of_the_neighbours(self, dtype, slot, implementation):
        case = large_case(shape_of(dtype, implementation))
        rng = np.random.default_rng(3)
        kept = rng.random(ROWS) < 0.2
        others = rng.integers(-1, 4, ROWS) if slot == "random" else slot
        slots = np.where(kept, case.row_slots, others).astype(np.int32)
        assert_rows_equal(
            run(case._replace(row_slots=slots), implementation),
            run(case, implementation),
            kept,
            kept,
        )

    def test_base_rows_whether_or_not_an_adapter_is_in_the_batch(self, dtype, implementation):
        case = large_case(shape_of(dtype, implementation))
        base = case.row_slots < 0
        none = case._replace(row_slots=np.full(ROWS, -1, np.int32))
        assert_rows_equal(run(none, implementation), run(case, implementation), base, base)

    def test_the_sizes_of_the_groups(self, dtype, implementation):
        """All rows in group 1, whose weights the first rows of group 1 had before."""
        case = large_case(shape_of(dtype, implementation))
        in_group = GROUP == 1
        rows = np.resize(np.flatnonzero(in_group), ROWS)
        moved = case._replace(
            x=case.x[rows],
            row_slots=case.row_slots[rows],
            group_sizes=np.array([0, ROWS, 0], np.int32),
        )
        assert_rows_equal(run(moved, implementation), run(case, implementation), rows)

    def test_rows_past_the_last_group(self, dtype, implementation):
        case = large_case(shape_of(dtype, implementation))
        sizes = np.array([110, 90, 17], np.int32)
        found = run(case._replace(group_sizes=sizes), implementation)
        assert_rows_equal(found, run(case, implementation), slice(217), slice(217))
        assert all(not value[217:].any() for value in found)


def test_zeros_past_the_rank_change_nothing(implementation):
    """The same adapters in a bank of a higher rank."""
    case = large_case(shape_of("float32", implementation))
    padding = ((0, 0), (0, 0), (0, 2), (0, 0))
    padded = tuple(
        pair._replace(a=np.pad(pair.a, padding), b=np.pad(pair.b, padding)) for pair in case.lora
    )
    assert_rows_equal(
        run(case._replace(lora=padded), implementation), run(case, implementation), slice(None)
    )


def test_a_row_alone_in_a_dense_layer_equals_the_grouped_row(implementation):
    """One group or several, the row's product is the same."""
    case = large_case(shape_of("float32", implementation))
    expected = run(case, implementation)
    lora = tuple(
        jax.tree.map(lambda v: v[:, 2:3] if v.shape[1] > 1 else v, pair) for pair in case.lora
    )
    dense = case._replace(
        x=case.x[GROUP == 2],
        w=case.w[2:3],
        group_sizes=np.array([100], np.int32),
        row_slots=case.row_slots[GROUP == 2],
        lora=lora,
    )
    assert_rows_equal(run(dense, implementation), expected, GROUP == 2)
