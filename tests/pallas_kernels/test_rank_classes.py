"""Slots in rank classes: the bits of a bank of one class, whatever the other classes hold."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Gate, Lora, grouped_lora_matmul, lora_matmul, moe_mlp
from pallas_kernels.grouped_lora_matmul import reference
from tests.pallas_kernels import test_moe_mlp
from tests.pallas_kernels.cases import Part, Shape, make_case
from tests.pallas_kernels.cases import jitted as jitted_values
from tests.pallas_kernels.class_cases import (
    RankClass,
    assert_same_products,
    firsts_of,
    in_classes,
    padded,
    ranks_of,
)

CLASSES = (RankClass(2, 8), RankClass(1, 24), RankClass(2, 16))
SHAPES = {
    "parts of unequal widths": Shape(
        45, 3, 64, (Part(64), Part(40, adapted=False), Part(32, shared_a=True, shared_b=True))
    ),
    "gate and up": Shape(45, 3, 64, (Part(64), Part(64))),
}
GATES = {"gate and up": Gate()}
SIZES = [20, 0, 19]  # six rows past the last group


def case_of(shape: Shape, sizes=SIZES):
    """The arrays of a call, and its `lora` in classes."""
    ranks = ranks_of(CLASSES)
    shape = dataclasses.replace(shape, slots=len(ranks), rank=max(ranks))
    slots = np.random.default_rng(1).integers(-1, len(ranks), shape.rows)
    case = make_case(shape, sizes, slots, ranks=ranks)
    return case, classes_of_parts(case.lora)


def classes_of_parts(lora):
    return tuple(None if pair is None else in_classes(pair, CLASSES) for pair in lora)


@functools.cache
def jitted(widths, gate, implementation):
    """(case, lora, dy) to y and the gradients of x and lora."""

    def run(case, lora, dy):
        def forward(x, lora):
            fixed = case.w, case.group_sizes, case.row_slots
            static = dict(parts=widths, gate=gate, implementation=implementation)
            return grouped_lora_matmul(x, *fixed, lora, **static)

        y, pullback = jax.vjp(forward, case.x, lora)
        return y, *pullback(dy)

    return jax.jit(run)


def run(name, implementation, case, lora):
    """y, dx and dlora."""
    gate, widths = GATES.get(name), SHAPES[name].served_by(implementation).widths
    width = sum(widths) // (1 if gate is None else 2)
    dy = np.random.default_rng(2).standard_normal((len(case.x), width)).astype(case.x.dtype)
    return jax.tree.map(np.asarray, jitted(widths, gate, implementation)(case, lora, dy))


def assert_same_bits(found, expected):
    for its, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert its.dtype == other.dtype
        np.testing.assert_array_equal(its, other)


def assert_close_to_definition(y, case, classes, shape):
    expected = reference.grouped_lora_matmul(*case._replace(lora=classes), parts=shape.widths)
    limit = 8 * shape.tolerance * np.abs(expected).max()
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=0, atol=limit)


def assert_same_gradients(found, expected):
    """Scalings', sums over the ranks, are not the same bits where there are more of these."""
    for its, other in zip(found, expected, strict=True):
        assert type(its) is type(other)
        for of_class, of_one in zip(its or (), other or (), strict=True):
            assert_same_products(of_class.a, of_one.a)
            assert_same_products(of_class.b, of_one.b)
            limit = 1e-5 * np.abs(of_one.scaling).max()
            np.testing.assert_allclose(of_class.scaling, of_one.scaling, rtol=0, atol=limit)


@pytest.mark.parametrize(
    "name", ["parts of unequal widths", pytest.param("gate and up", marks=pytest.mark.slow)]
)
def test_classes_have_the_bits_of_one_class(name, implementation):
    """Values, and gradients of x, a, b and scaling, as of ranks padded to the largest."""
    shape = SHAPES[name].served_by(implementation)
    case, classes = case_of(shape)
    y, dx, dlora = run(name, implementation, case, classes)
    expected_y, expected_dx, expected = run(name, implementation, case, case.lora)
    assert_same_bits((y, dx), (expected_y, expected_dx))
    assert_same_gradients(dlora, classes_of_parts(expected))
    if name not in GATES:
        assert_close_to_definition(y, case, classes, shape)


def test_nan_in_a_class_stays_there(implementation):
    name = "parts of unequal widths"
    shape = SHAPES[name].served_by(implementation)
    case, classes = case_of(shape)
    sound = run(name, implementation, case, classes)
    found = run(name, implementation, case, tuple(map(poisoned, classes)))
    others = case.row_slots != 2
    assert_same_bits([v[others] for v in found[:2]], [v[others] for v in sound[:2]])
    hit = found[0][~others & (np.arange(45) < sum(SIZES))]
    adapted = np.repeat([part.adapted for part in shape.parts], shape.widths)
    assert (np.isnan(hit.astype(np.float32)) == adapted).all()
    for part, expected in zip(found[2], sound[2], strict=True):
        if part is not None:
            assert_same_bits((part[0], part[2]), (expected[0], expected[2]))


def poisoned(classes):
    """NaN in all of the second class."""
    if classes is None:
        return None
    first, second, *rest = classes
    return first, Lora(*(np.full_like(array, np.nan) for array in second)), *rest


@pytest.mark.parametrize("kernels", [pytest.param("platform", marks=pytest.mark.slow), "triton"])
def test_a_class_has_the_bits_it_has_alone(kernels, implementation):
    """Of its own rank, with nothing else in the bank."""
    implementation = implementation if kernels == "platform" else kernels
    shape = Shape(30, 2, 40, (Part(32, shared_a=True), Part(24, shared_scaling=True)))
    shape = shape.served_by(implementation)
    case, classes = case_of(shape, [17, 9])
    compiled = jitted_values(shape.widths, implementation)
    y = np.asarray(compiled(*case._replace(lora=classes)))
    assert_close_to_definition(y, case, classes, shape)
    with_nan = np.asarray(compiled(*case._replace(lora=tuple(map(poisoned, classes)))))
    assert_same_bits(with_nan[case.row_slots != 2], y[case.row_slots != 2])
    assert np.isnan(with_nan[:26][case.row_slots[:26] == 2].astype(np.float32)).all()
    for number, first in enumerate(firsts_of(CLASSES)):
        own = case.row_slots - first
        mine = (own >= 0) & (own < CLASSES[number].slots)
        alone = tuple(part[number] for part in classes)
        found = compiled(*case._replace(lora=alone, row_slots=np.where(mine, own, -1)))
        assert_same_bits(np.asarray(found)[mine], y[mine])


MOE_CLASSES = (RankClass(2, 2), RankClass(1, 4))


@functools.cache
def jitted_layer(implementation):
    def run(call, lora, dy):
        def layer(x, lora):
            return moe_mlp(**(call | lora | {"x": x}), implementation=implementation)

        y, pullback = jax.vjp(layer, call["x"], lora)
        return y, pullback(dy)

    return jax.jit(run)


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param("per expert", marks=pytest.mark.slow),
        pytest.param("shared outer", marks=pytest.mark.slow),
        pytest.param("shared outer, one scaling", marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_classes_has_the_bits_of_one_class(shared, implementation):
    dtype = np.dtype("float32" if implementation == "xla" else jnp.bfloat16)
    call = test_moe_mlp.arguments(test_moe_mlp.SHARED[shared], dtype=dtype)
    one = {}
    for name in test_moe_mlp.LORA:
        a, b, scaling = call.pop(name)
        one[name] = Lora(padded(a, MOE_CLASSES), padded(b, MOE_CLASSES), scaling)
    classes = {name: in_classes(pair, MOE_CLASSES) for name, pair in one.items()}
    dy = np.random.default_rng(3).standard_normal(call["x"].shape).astype(np.float32)
    layer = jitted_layer(implementation)
    y, (dx, found) = jax.tree.map(np.asarray, layer(call, classes, dy))
    expected_y, (expected_dx, expected) = jax.tree.map(np.asarray, layer(call, one, dy))
    definition = test_moe_mlp.one_by_one(call | one)
    limit = (1e-5 if dtype == np.float32 else 2**-5) * np.abs(definition).max()
    np.testing.assert_allclose(y, definition, rtol=0, atol=limit)
    assert_same_bits((y, dx), (expected_y, expected_dx))
    expected = [in_classes(expected[name], MOE_CLASSES) for name in test_moe_mlp.LORA]
    assert_same_gradients([found[name] for name in test_moe_mlp.LORA], expected)


def zeros(*shape):
    return np.zeros(shape, np.float32)


def pair(slots, rank, n=10, groups=3, dtype=np.float32):
    a, b = np.zeros((slots, groups, rank, 8), dtype), np.zeros((slots, 3, rank, n), dtype)
    return Lora(a, b, zeros(slots, 3))


BAD = {
    "other numbers of classes": (
        ((pair(2, 4), pair(1, 8)), pair(3, 8)),
        r"same number of slots in each of the same rank classes, got \(2, 1\) and \(3,\)",
    ),
    "other slots": (((pair(2, 4), pair(1, 8)), (pair(1, 4), pair(2, 8))), r"\(1, 2\) and \(2, 1\)"),
    "no class": (((), None), "rank class must have a slot"),
    "a class without slots": (((pair(2, 4), pair(0, 8)), None), r"have a slot, got .*\(2, 0\)"),
    "a shared class": (((pair(2, 4), pair(1, 8, groups=1)), None), "slots and rank alone"),
    "a class of another dtype": (
        ((pair(2, 4), pair(1, 8, dtype=jnp.bfloat16)), None),
        "slots and rank alone.*float32.*bfloat16",
    ),
    "a class of another width": (((pair(2, 4), pair(1, 8, n=12)), None), r"lora\.b must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_classes_that_do_not_belong_together(name):
    lora, message = BAD[name]
    x, w, sizes = zeros(6, 8), zeros(3, 20, 8), np.array([2, 2, 2], np.int32)
    slots = np.zeros(6, np.int32)
    with pytest.raises(ValueError, match=message):
        grouped_lora_matmul(x, w, sizes, slots, lora, parts=(10, 10))


def test_classes_of_a_layer_that_do_not_belong_together():
    call = test_moe_mlp.arguments()
    split = {name: in_classes(call[name], MOE_CLASSES) for name in ("lora_gate", "lora_up")}
    with pytest.raises(ValueError, match=r"lora_down must have.*\(2, 1\) and \(3,\)"):
        moe_mlp(**(call | split))


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_of_a_dense_layer(rows, implementation):
    """Each row of a class of its own: no class's factors stand for another's."""
    classes = tuple(range(sum(its.slots for its in CLASSES)))
    shape = Shape(rows, 1, 64, (Part(64),)).served_by(implementation)
    ranks = ranks_of(CLASSES)
    shape = dataclasses.replace(shape, slots=len(ranks), rank=max(ranks))
    for first in (-1, *classes):
        slots = np.arange(first, first + rows) % len(ranks) if first >= 0 else np.full(rows, -1)
        case = make_case(shape, [rows], slots, ranks=ranks)
        dense = jax.jit(functools.partial(lora_matmul, implementation=implementation))
        y = dense(case.x, case.w[0], case.row_slots, classes_of_parts(case.lora))
        assert_close_to_definition(np.asarray(y), case, classes_of_parts(case.lora), shape)
