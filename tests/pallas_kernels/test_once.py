"""Arrays that are there several times go through transformations as one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.once import Once


def test_an_array_that_is_there_twice_is_one_operand():
    x, y = jnp.arange(3.0), jnp.ones(2)

    @jax.custom_vjp
    def double(once):
        first, second, other = once.values
        assert first is second and other is not first
        return Once.of((2 * first, other))

    double.defvjp(lambda once: (double(once), None), lambda saved, gradient: (gradient,))
    once = Once.of((x, x, y))
    assert len(jax.tree.leaves(once)) == 2
    (equation,) = jax.make_jaxpr(double)(once).eqns
    assert len(equation.invars) == 2
    found, kept = jax.jit(double)(once).values
    np.testing.assert_array_equal(found, 2 * x)
    np.testing.assert_array_equal(kept, y)


def test_none_and_structures():
    once = Once.of(((None, 1.0), [2.0]))
    again = jax.tree.map(lambda leaf: leaf + 1, once)
    assert again.values == ((None, 2.0), [3.0])
    assert jax.tree.structure(again) == jax.tree.structure(once)


def test_any_leaves_make_the_same_tree():
    """JAX fills trees with one value, of functions with gradients of their own above all."""
    x, y = jnp.arange(3.0), jnp.ones(3)
    once = Once.of((x, x, y))
    tree = jax.tree.structure(once)
    zero = object()
    assert jax.tree.leaves(jax.tree.unflatten(tree, [zero, zero])) == [zero, zero]

    @jax.custom_vjp
    def scaled(once, scale):
        return scale * once.values[1]

    scaled.defvjp(
        lambda once, scale: (scaled(once, scale), once.values[1]),
        lambda saved, gradient: (None, jnp.vdot(saved, gradient)),
    )
    gradient = jax.grad(lambda scale: jax.jit(scaled)(once, scale).sum())(2.0)
    assert gradient == x.sum()
