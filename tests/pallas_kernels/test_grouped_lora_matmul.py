"""`grouped_lora_matmul` and `lora_matmul` against the definition in `reference.py`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import Gate, Lora, grouped_lora_matmul, lora_matmul
from pallas_kernels.grouped_lora_matmul import api, reference, triton, xla
from tests.pallas_kernels.cases import (
    Part,
    Shape,
    cases,
    in_layers,
    jitted,
    make_bias,
    make_case,
    rounding_of_u,
)

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


def check(shape, case, implementation, out_dtype=None, bias=None):
    x, total = np.array(case.x), int(case.group_sizes.sum())
    x[total:] = np.nan  # rows past the last group may hold anything
    product = jitted(shape.widths, implementation, out_dtype)
    y = np.asarray(product(*case._replace(x=x), bias=bias))
    assert y.shape == (shape.rows, sum(shape.widths)) and y.dtype == (out_dtype or case.x.dtype)
    assert np.array_equal(y[total:], np.zeros_like(y[total:]))
    expected = reference.grouped_lora_matmul(*case, parts=shape.widths, bias=bias)
    tolerance = shape.tolerance
    if out_dtype is not None:
        tolerance = 1e-5
    limit = tolerance * (1 + np.abs(expected))
    if implementation != "xla" and case.x.dtype != np.float32:
        limit += rounding_of_u(case, shape.widths)  # kernels keep u in x's dtype
    error = np.abs(y.astype(np.float64) - expected)
    assert (error <= limit).all(), f"{np.max(error / limit):.3g} x the tolerance"


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_equals_the_definition(name, implementation, data):
    shape = SHAPES[name].served_by(implementation)
    check(shape, data.draw(cases(shape)), implementation)


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
def test_group_sizes_at_the_edges(group_sizes, implementation):
    rng, shape = np.random.default_rng(1), SHAPE.served_by(implementation)
    check(shape, make_case(shape, group_sizes, rng.integers(-1, 4, 75)), implementation)


@pytest.mark.parametrize("slots", [[-1], [0], [3], [3, -1, 0, 0, 2]], ids=str)
def test_slots_need_no_order_inside_a_group(slots, implementation):
    shape = SHAPE.served_by(implementation)
    check(shape, make_case(shape, [20, 0, 40, 5, 3], np.resize(slots, 75)), implementation)


def test_scaling_may_be_shared_while_the_factors_are_not(implementation):
    shape = Shape(40, 3, 18, (Part(6, shared_scaling=True),)).served_by(implementation)
    check(shape, make_case(shape, [10, 20, 5], np.arange(40) % 5 - 1), implementation)


def test_a_dense_layer_is_one_group(implementation):
    shape = SHAPES["dense, everything a multiple"].served_by(implementation)
    case = make_case(shape, [64], np.arange(64) % 5 - 1)
    dense = jax.jit(functools.partial(lora_matmul, implementation=implementation))
    y = dense(case.x, case.w[0], case.row_slots, case.lora)
    assert np.array_equal(y, jitted(shape.widths, implementation)(*case))


def test_without_adapters_it_is_the_base_product(implementation):
    shape = SHAPE.served_by(implementation)
    case = make_case(shape, [20, 0, 40, 5, 3], np.full(75, -1))
    base = jitted(None, implementation)(case.x, case.w, case.group_sizes)
    assert np.array_equal(base, jitted(shape.widths, implementation)(*case))


@pytest.mark.parametrize("group_sizes", [[20, 0, 40, 5], [1, 0, 0, 1]], ids=str)
def test_sums_of_bfloat16_may_stay_float32(group_sizes, implementation):
    shape = SHAPES["bfloat16"].served_by(implementation)
    case = make_case(shape, group_sizes, np.arange(75) % 5 - 1)
    check(shape, case, implementation, jnp.float32)
    # Rounded they are the product of today.
    y, wide = (jitted(shape.widths, implementation, out)(*case) for out in (None, jnp.float32))
    assert np.array_equal(y, wide.astype(y.dtype))


BIASED = ["fused, one part without adapters", "bfloat16"]


@pytest.mark.parametrize("name", BIASED)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_bias_of_each_group(name, implementation, data):
    shape = SHAPES[name].served_by(implementation)
    case = data.draw(cases(shape))
    check(shape, case, implementation, bias=make_bias(case))


@pytest.mark.parametrize("name", BIASED)
def test_with_a_bias_a_row_has_the_same_bits_alone(name, implementation):
    shape = SHAPES[name].served_by(implementation)
    case = make_case(shape, [20, 30, 0, 10, 5][: shape.groups], np.arange(75) % 5 - 1)
    together = np.asarray(jitted(shape.widths, implementation)(*case, bias=make_bias(case)))
    for row, group in (0, 0), (19, 0), (37, 1), (50, 3):
        one = slice(row, row + 1)
        sizes = (np.arange(shape.groups) == group).astype(np.int32)
        alone = case._replace(x=case.x[one], row_slots=case.row_slots[one], group_sizes=sizes)
        y = jitted(shape.widths, implementation)(*alone, bias=make_bias(case))
        assert np.array_equal(y[0], together[row])


def test_a_bias_is_added_before_sums_are_rounded(implementation):
    shape = SHAPES["bfloat16"].served_by(implementation)
    case = make_case(shape, [20, 0, 40, 5], np.arange(75) % 5 - 1)
    y, wide = (
        np.asarray(jitted(shape.widths, implementation, out)(*case, bias=make_bias(case)))
        for out in (None, jnp.float32)
    )
    check(shape, case, implementation, jnp.float32, make_bias(case))
    assert np.array_equal(y, wide.astype(y.dtype))
    gated = functools.partial(
        grouped_lora_matmul, parts=shape.widths, gate=Gate(), implementation=implementation
    )
    found = np.asarray(jax.jit(gated)(*case, bias=make_bias(case)), np.float64)
    gate, up = np.split(y.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(found, gate / (1 + np.exp(-gate)) * up, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("bias", ["alone", "of a layer"])
def test_the_bias_of_heads(bias, implementation):
    """Of equal groups, which have no sizes."""
    shape = Shape(30, 3, 64, (Part(64),)).served_by(implementation)
    case = make_case(shape, [10, 10, 10], np.arange(30) % 5 - 1)
    values = make_bias(case)
    found = jitted(None, implementation)(
        *case._replace(group_sizes=None),
        bias=values if bias == "alone" else in_layers(values),
    )
    expected = reference.grouped_lora_matmul(*case, bias=values)
    limit = shape.tolerance * (1 + np.abs(expected)) + rounding_of_u(case, shape.widths)
    assert (np.abs(np.asarray(found, np.float64) - expected) <= limit).all()


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

    def run(x, lora):
        slots = case.row_slots[:0]
        return grouped_lora_matmul(x, case.w, case.group_sizes, slots, lora, parts=SHAPE.widths)

    y, pullback = jax.vjp(run, case.x[:0], case.lora)
    assert y.shape == (0, 40)
    assert not any(np.asarray(gradient).any() for gradient in jax.tree.leaves(pullback(y)))


def test_no_rows_of_equal_groups():
    y, pullback = jax.vjp(lambda x: lora_matmul(x, zeros(6, 8)), zeros(0, 8))
    assert y.shape == (0, 6) and pullback(y)[0].shape == (0, 8)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
def test_sizes_and_slots_of_any_integers(dtype):
    case = make_case(SHAPE, [40, 35, 0, 0, 0], np.full(75, -1))
    sizes, slots = case.group_sizes.astype(dtype), np.full(75, 1).astype(dtype)
    many = np.repeat(np.asarray(case.x), 4, axis=0), np.repeat(slots, 4)
    found = grouped_lora_matmul(
        many[0], case.w, (3 * sizes).astype(dtype), many[1], case.lora, parts=SHAPE.widths
    )
    expected = grouped_lora_matmul(
        many[0],
        case.w,
        3 * case.group_sizes,
        many[1].astype(np.int32),
        case.lora,
        parts=SHAPE.widths,
    )
    np.testing.assert_array_equal(found, expected)


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
    "w of two axes": (dict(w=zeros(10, 8)), r"w must be \[groups, n, k\], .*, got \(10, 8\)"),
    "x of integers": (dict(x=np.zeros((6, 8), np.int32)), "x must be a floating-point.*int32"),
    "w of integers": (dict(w=np.zeros((3, 10, 8), np.int8)), "w must be a floating-point.*int8"),
    "sizes that are no integers": (dict(group_sizes=zeros(3)), "group_sizes must be integers"),
    "slots that are no integers": (dict(row_slots=zeros(6)), "row_slots must be integers"),
    "no group sizes for rows that make no groups": (
        dict(group_sizes=None, w=zeros(4, 10, 8)),
        "6 rows do not make 4 equal groups",
    ),
    "a part of negative width": (dict(parts=(12, -2), lora=(None, None)), "must add up to 10"),
    "a gate of three parts": (
        dict(parts=(5, 3, 2), lora=(None,) * 3, gate=Gate()),
        r"a gate needs N = \[gate \| up\]",
    ),
    "gate and up of unequal widths": (
        dict(parts=(6, 4), lora=(None, None), gate=Gate()),
        "equal widths",
    ),
    "a result in another dtype": (dict(out_dtype=jnp.bfloat16), "out_dtype is None or float32"),
    "a gate that is not rounded": (
        dict(gate=Gate(), out_dtype=jnp.float32),
        "out_dtype is None or float32, without a gate",
    ),
    "a of three axes": (
        dict(lora=(Lora(zeros(2, 4, 8), zeros(2, 3, 4, 10), zeros(2, 3)),)),
        r"lora\.a must be \[slots, 3 or 1, rank of at least 1, 8\], got \(2, 4, 8\)",
    ),
    "a of rank 0": (
        dict(lora=(Lora(zeros(2, 3, 0, 8), zeros(2, 3, 0, 10), zeros(2, 3)),)),
        "rank of at least 1",
    ),
    "a and b of two dtypes": (
        dict(lora=(Lora(zeros(2, 3, 4, 8), zeros(2, 3, 4, 10).astype("f2"), zeros(2, 3)),)),
        "one dtype, got float32 and float16",
    ),
    "a bias of one group too few": (
        dict(bias=zeros(2, 10)),
        r"bias must be float32\[3, 10\].*w \(3, 10, 8\), got float32\[2, 10\]",
    ),
    "a bias of another dtype": (
        dict(bias=zeros(3, 10).astype("f2")),
        r"of x's dtype.*got float16\[3, 10\]",
    ),
    "integer scaling": (
        dict(lora=(Lora(zeros(2, 3, 4, 8), zeros(2, 3, 4, 10), np.ones((2, 3), int)),)),
        r"lora\.scaling must be a floating-point",
    ),
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


def test_naming_the_implementation_changes_nothing(implementation):
    shape = SHAPE.served_by(implementation)
    case = make_case(shape, [20, 0, 40, 5, 3], np.arange(75) % 5 - 1)
    chosen = jitted(shape.widths, None)(*case)
    assert np.array_equal(chosen, jitted(shape.widths, implementation)(*case))


def test_kernels_that_cannot_serve_the_shapes_say_so():
    """Asked for by name; without a name such shapes are plain JAX's."""
    if jax.__version_info__ < (0, 11):
        message = "needs jax 0.11"
    else:
        message = r"must be bfloat16 \(x float32\[6, 8\], w float32\[3, 10, 8\]"
    with pytest.raises(NotImplementedError, match=message):
        grouped_lora_matmul(**GOOD, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "best", ["xla"] if jax.__version_info__ < (0, 11) else ["xla", "mosaic_gpu"]
)
def test_gpus_have_kernels_for_what_hoppers_do_not_serve(monkeypatch, best):
    monkeypatch.setattr(api, "platform_implementation", lambda: best)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert api.choose_backend(None, GOOD["x"], GOOD["w"], (None,), (10,)) is triton


def test_a_platform_without_its_kernels_for_these_shapes_takes_plain_jax(monkeypatch):
    monkeypatch.setattr(api, "platform_implementation", lambda: "mosaic_tpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    wide = GOOD["x"].astype(np.float16), GOOD["w"].astype(np.float16)
    assert api.choose_backend(None, *wide, (None,), (10,)) is xla
    with pytest.raises(NotImplementedError, match="mosaic_tpu"):
        api.choose_backend("mosaic_tpu", *wide, (None,), (10,))
