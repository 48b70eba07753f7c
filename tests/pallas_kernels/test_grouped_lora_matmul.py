"""`grouped_lora_matmul` and `lora_matmul` against the definition in `reference.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import Lora, grouped_lora_matmul, lora_matmul
from pallas_kernels.grouped_lora_matmul import reference
from tests.pallas_kernels.cases import Part, Shape, cases, jitted, make_case

# Widths are no multiples of 16 unless they say so; 533 is past K_BLOCK, 17 past RANK_BLOCK.
SHAPES = {
    "dense, everything a multiple": Shape(64, 1, 64, (Part(32),), rank=4),
    "fused, one part without adapters": Shape(
        75, 5, 37, (Part(24), Part(9, adapted=False), Part(7, shared_a=True)), rank=3
    ),
    "wide and high rank": Shape(
        40, 3, 533, (Part(70, shared_b=True, shared_scaling=True),), rank=17
    ),
    "both factors shared": Shape(
        45, 4, 16, (Part(5, shared_a=True, shared_b=True, shared_scaling=True),), slots=1, rank=1
    ),
    "bfloat16": Shape(75, 4, 40, (Part(20), Part(20)), rank=5, dtype="bfloat16"),
}


def check(shape, case):
    x, total = np.array(case.x), int(case.group_sizes.sum())
    x[total:] = np.nan  # rows past the last group may hold anything
    y = np.asarray(jitted(shape.widths)(*case._replace(x=x)))
    assert y.shape == (shape.rows, sum(shape.widths)) and y.dtype == case.x.dtype
    assert np.array_equal(y[total:], np.zeros_like(y[total:]))
    expected = reference.grouped_lora_matmul(*case, parts=shape.widths)
    tolerance = 1e-5 if shape.dtype == "float32" else 2**-8  # the rounding of the result
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_equals_the_definition(name, data):
    check(SHAPES[name], data.draw(cases(SHAPES[name])))


SHAPE = SHAPES["fused, one part without adapters"]


@pytest.mark.parametrize(
    "group_sizes",
    [
        [0, 0, 0, 0, 0],
        [75, 0, 0, 0, 0],
        [0, 0, 75, 0, 0],
        [0, 0, 0, 0, 75],
        [1, 0, 1, 0, 1],
        [32, 32, 1, 0, 0],
        [33, 0, 31, 10, 1],
        [15, 15, 15, 15, 15],
    ],
    ids=str,
)
def test_group_sizes_at_the_edges(group_sizes):
    rng = np.random.default_rng(1)
    check(SHAPE, make_case(SHAPE, group_sizes, rng.integers(-1, 4, 75)))


@pytest.mark.parametrize("slots", [[-1], [0], [3], [3, -1, 0, 0, 2]], ids=str)
def test_slots_need_no_order_inside_a_group(slots):
    check(SHAPE, make_case(SHAPE, [20, 0, 40, 5, 3], np.resize(slots, 75)))


def test_scaling_may_be_shared_while_the_factors_are_not():
    shape = Shape(40, 3, 18, (Part(6, shared_scaling=True),))
    check(shape, make_case(shape, [10, 20, 5], np.arange(40) % 5 - 1))


def test_a_dense_layer_is_one_group():
    shape = SHAPES["dense, everything a multiple"]
    case = make_case(shape, [64], np.arange(64) % 5 - 1)
    y = jax.jit(lora_matmul)(case.x, case.w[0], case.row_slots, case.lora)
    assert np.array_equal(y, jitted(shape.widths)(*case))


def test_without_adapters_it_is_the_base_product():
    case = make_case(SHAPE, [20, 0, 40, 5, 3], np.full(75, -1))
    base = jax.jit(grouped_lora_matmul)(case.x, case.w, case.group_sizes)
    assert np.array_equal(base, jitted(SHAPE.widths)(*case))


def test_float64():
    shape = Shape(20, 2, 19, (Part(6),), rank=3)
    case = make_case(shape, [9, 7], np.arange(20) % 5 - 1)
    wide = jax.tree.map(lambda v: v.astype(np.float64) if v.dtype == np.float32 else v, case)
    with jax.enable_x64(True):
        y = jax.jit(grouped_lora_matmul)(*wide)
        assert y.dtype == jnp.float64
    np.testing.assert_allclose(y, reference.grouped_lora_matmul(*wide), rtol=1e-13, atol=1e-13)


def test_no_rows():
    case = make_case(SHAPE, [0] * 5, np.full(75, -1))
    y = grouped_lora_matmul(
        case.x[:0], case.w, case.group_sizes, case.row_slots[:0], case.lora, parts=SHAPE.widths
    )
    assert y.shape == (0, 40)


def zeros(*shape):
    return np.zeros(shape, np.float32)


GOOD = dict(
    x=zeros(6, 8),
    w=zeros(3, 10, 8),
    group_sizes=np.zeros(3, np.int32),
    row_slots=np.zeros(6, np.int32),
    lora=(Lora(zeros(2, 3, 4, 8), zeros(2, 3, 4, 10), zeros(2, 3)),),
)
BAD = {
    "x of another width": (dict(x=zeros(6, 9)), r"x must be \[rows, 8\].*\(6, 9\)"),
    "x of three axes": (dict(x=zeros(1, 6, 8)), "x must be"),
    "one size too few": (dict(group_sizes=np.zeros(2, np.int32)), r"group_sizes must be \[3\]"),
    "parts that do not add up": (dict(parts=(4, 5)), "must add up to 10"),
    "fewer lora entries than parts": (dict(parts=(4, 6)), "match the 1 lora entries"),
    "no slots": (dict(row_slots=None), r"row_slots must be \[6\].*None"),
    "slots of other rows": (dict(row_slots=np.zeros(5, np.int32)), r"row_slots must be \[6\]"),
    "a of another width": (
        dict(lora=(Lora(zeros(2, 3, 4, 7), zeros(2, 3, 4, 10), zeros(2, 3)),)),
        r"lora\.a must be \(2, '3 or 1', 4, 8\), got \(2, 3, 4, 7\)",
    ),
    "a of other groups": (
        dict(lora=(Lora(zeros(2, 2, 4, 8), zeros(2, 3, 4, 10), zeros(2, 3)),)),
        r"lora\.a must be",
    ),
    "b of another rank": (
        dict(lora=(Lora(zeros(2, 3, 4, 8), zeros(2, 3, 5, 10), zeros(2, 3)),)),
        r"lora\.b must be",
    ),
    "b of other slots": (
        dict(lora=(Lora(zeros(2, 3, 4, 8), zeros(3, 3, 4, 10), zeros(2, 3)),)),
        r"lora\.b must be",
    ),
    "scaling without groups": (
        dict(lora=(Lora(zeros(2, 3, 4, 8), zeros(2, 3, 4, 10), zeros(2)),)),
        r"lora\.scaling must be",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_shapes_that_do_not_belong_together(name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        grouped_lora_matmul(**{**GOOD, **change})


def test_an_unknown_implementation_is_named_with_the_shapes():
    with pytest.raises(NotImplementedError) as error:
        grouped_lora_matmul(**GOOD, implementation="nonsense")
    for part in ("nonsense", "(6, 8)", "(3, 10, 8)"):
        assert part in str(error.value)


def test_naming_the_implementation_changes_nothing():
    case = make_case(SHAPE, [20, 0, 40, 5, 3], np.arange(75) % 5 - 1)
    named = jax.jit(
        lambda case: grouped_lora_matmul(*case, parts=SHAPE.widths, implementation="xla")
    )
    assert np.array_equal(named(case), jitted(SHAPE.widths)(*case))
