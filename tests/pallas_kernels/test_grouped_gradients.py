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
from tests.pallas_kernels.cases import Part, Shape, cases, jitted_with_gradients, make_case

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
DY = np.random.default_rng(5).standard_normal((45, 27))


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


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_equals_the_gradient_of_the_dense_formula(data):
    case = data.draw(cases(SHAPE))
    case = jax.tree.map(lambda v: v.astype(np.float64) if v.dtype == np.float32 else v, case)
    group = np.repeat(np.arange(4), [*case.group_sizes, 45 - case.group_sizes.sum()])
    with jax.enable_x64(True):
        found = jitted_with_gradients(SHAPE.widths)(case, DY)
        expected = dense(SHAPE.widths)(case.x, case.w, case.lora, group, case.row_slots, DY)
        found, expected = (jax.tree.map(np.asarray, v) for v in (found, expected))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for value, reference in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, reference, rtol=1e-11, atol=1e-11)


BF16 = Shape(40, 2, 17, (Part(18),), rank=2, dtype="bfloat16")


def test_gradients_have_the_dtypes_of_what_they_belong_to():
    case = make_case(BF16, [25, 10], np.arange(40) % 5 - 1)
    dy = np.asarray(DY[:40, :18], case.x.dtype)
    y, dx, (dlora,) = jitted_with_gradients(BF16.widths)(case, dy)
    assert y.dtype == dx.dtype == dlora.a.dtype == dlora.b.dtype == jnp.bfloat16
    assert dlora.scaling.dtype == jnp.float32
    dy64 = dy.astype(np.float64)
    wide = jax.tree.map(lambda v: np.asarray(v, np.float64) if v.dtype == dy.dtype else v, case)
    with jax.enable_x64(True):
        group = np.repeat(np.arange(3), [25, 10, 5])
        expected = dense(BF16.widths)(wide.x, wide.w, wide.lora, group, wide.row_slots, dy64)
    for value, reference in zip(*map(jax.tree.leaves, ((y, dx, dlora), expected)), strict=True):
        np.testing.assert_allclose(np.asarray(value, np.float32), reference, rtol=2**-8, atol=2**-8)


def test_the_base_is_frozen():
    case = make_case(BF16, [25, 10], np.arange(40) % 5 - 1)

    def loss(w):
        return grouped_lora_matmul(case.x, w, *case[2:]).astype(jnp.float32).sum()

    assert not np.asarray(jax.jit(jax.grad(loss))(case.w), np.float32).any()


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["x", "lora"])
def test_numpy_arguments_outside_of_jit(argument):
    case = make_case(Shape(5, 1, 3, (Part(2),), rank=1), [5], [0, -1, 1, 2, 3])

    def loss(value):
        return grouped_lora_matmul(*case._replace(**{argument: value})).sum()

    gradient = jax.grad(loss)(getattr(case, argument))
    assert all(np.asarray(v).any() for v in jax.tree.leaves(gradient))
