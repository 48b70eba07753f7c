"""The custom VJP against automatic differentiation of a dense formula, in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import grouped_lora_matmul
from tests.pallas_kernels.cases import (
    Part,
    Shape,
    cases,
    jitted_with_gradients,
    make_bias,
    make_case,
)

SHAPE = Shape(
    rows=45,
    groups=3,
    k=17,
    parts=(
        Part(2),
        Part(3, shared_a=True, shared_scaling=True),
        Part(4, adapted=False),
        Part(18, shared_b=True),
    ),
    rank=2,
)


def random_dy(shape):
    return np.random.default_rng(5).standard_normal((shape.rows, sum(shape.widths)))


@functools.cache
def dense(widths):
    """The formula of the documentation with every row's matrices gathered."""

    def forward(x, w, lora, group, row_slots):
        inside = (group < w.shape[0])[:, None]
        group = jnp.minimum(group, w.shape[0] - 1)
        y, slot = jnp.einsum("mk,mnk->mn", x, w[group]), jnp.maximum(row_slots, 0)
        pieces = jnp.split(y, np.cumsum(widths)[:-1], axis=1)
        for i, pair in enumerate(lora):
            if pair is not None:
                a, b, scaling = (v[slot, group if v.shape[1] > 1 else 0] for v in pair)
                u = scaling[:, None] * jnp.einsum("mk,mrk->mr", x, a)
                delta = jnp.einsum("mr,mrn->mn", u, b)
                pieces[i] += jnp.where((row_slots >= 0)[:, None], delta, 0)
        return jnp.where(inside, jnp.concatenate(pieces, axis=1), 0)

    def run(x, w, lora, group, row_slots, dy):
        y, pullback = jax.vjp(lambda x, lora: forward(x, w, lora, group, row_slots), x, lora)
        return y, *pullback(dy)

    return jax.jit(run)


def wide(tree):
    return jax.tree.map(
        lambda v: v.astype(np.float64) if jnp.issubdtype(v.dtype, jnp.floating) else v, tree
    )


def expect(shape, case, dy):
    """y, dx and the gradients of every part, in float64."""
    rows, groups = shape.rows, shape.groups
    group = np.repeat(np.arange(groups + 1), [*case.group_sizes, rows - case.group_sizes.sum()])
    case = wide(case)
    with jax.enable_x64(True):
        expected = dense(shape.widths)(case.x, case.w, case.lora, group, case.row_slots, wide(dy))
        return jax.tree.map(np.asarray, expected)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_equals_the_gradient_of_the_dense_formula(implementation, data):
    """In float64 where the kernels serve it."""
    shape = SHAPE.served_by(implementation)
    case, dy = data.draw(cases(shape)), random_dy(shape)
    exact = shape.dtype == "float32"
    case, dy = (wide(case), dy) if exact else (case, dy.astype(case.x.dtype))
    with jax.enable_x64(exact):
        found = jitted_with_gradients(shape.widths, implementation)(case, dy)
        found = jax.tree.map(np.asarray, found)
    assert_equal_gradients(found, expect(shape, case, dy), case, 1e-11 if exact else 2**-5)


def assert_equal_gradients(found, expected, case, tolerance):
    """Within a tolerance of each array's size, and in the dtype of what each belongs to."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    dtypes = [case.x.dtype, case.x.dtype, *(v.dtype for v in jax.tree.leaves(case.lora))]
    leaves = map(jax.tree.leaves, (found, expected))
    for value, reference, dtype in zip(*leaves, dtypes, strict=True):
        assert value.dtype == dtype
        atol = tolerance * max(1, np.abs(reference).max())
        np.testing.assert_allclose(wide(value), reference, rtol=tolerance, atol=atol)


BF16 = Shape(40, 2, 17, (Part(18),), rank=2, dtype="bfloat16")


def test_gradients_have_the_dtypes_of_what_they_belong_to(implementation):
    shape = BF16.served_by(implementation)
    case = make_case(shape, [25, 10], np.arange(40) % 5 - 1)
    dy = random_dy(shape).astype(case.x.dtype)
    found = jitted_with_gradients(shape.widths, implementation)(case, dy)
    assert found[2][0].a.dtype == jnp.bfloat16 and found[2][0].scaling.dtype == jnp.float32
    found = jax.tree.map(np.asarray, found)
    assert_equal_gradients(found, expect(shape, case, dy), case, 2**-7)


def test_gradients_of_float32_sums_are_those_of_rounded_ones(implementation):
    """The cotangent is rounded first."""
    shape = BF16.served_by(implementation)
    case = make_case(shape, [25, 10], np.arange(40) % 5 - 1)
    dy = random_dy(shape).astype(np.float32)
    rounded = dy.astype(case.x.dtype)
    _, *expected = jitted_with_gradients(shape.widths, implementation)(case, rounded)
    y, *found = jitted_with_gradients(shape.widths, implementation, jnp.float32)(case, dy)
    assert y.dtype == jnp.float32
    for value, reference in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert value.dtype == reference.dtype and np.array_equal(value, reference)


def test_the_base_is_frozen(implementation):
    case = make_case(BF16.served_by(implementation), [25, 10], np.arange(40) % 5 - 1)

    call = functools.partial(grouped_lora_matmul, implementation=implementation)

    def loss(w, bias):
        return call(case.x, w, *case[2:], bias=bias).astype(jnp.float32).sum()

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(case.w, make_bias(case)):
        assert not np.asarray(gradient, np.float32).any()


def test_a_bias_changes_no_gradient(implementation):
    """Without a gate; with one see `test_moe_mlp`."""
    shape = BF16.served_by(implementation)
    case = make_case(shape, [25, 10], np.arange(40) % 5 - 1)
    dy = random_dy(shape).astype(case.x.dtype)
    run = jitted_with_gradients(shape.widths, implementation)
    (y, *found), (base, *expected) = run(case, dy, make_bias(case)), run(case, dy)
    assert not np.array_equal(y, base)
    for value, reference in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.array_equal(value, reference)


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["x", "lora"])
def test_numpy_arguments_outside_of_jit(argument):
    case = make_case(Shape(5, 1, 3, (Part(2),), rank=1), [5], [0, -1, 1, 2, 3])

    def loss(value):
        return grouped_lora_matmul(*case._replace(**{argument: value})).sum()

    gradient = jax.grad(loss)(getattr(case, argument))
    assert all(np.asarray(v).any() for v in jax.tree.leaves(gradient))
