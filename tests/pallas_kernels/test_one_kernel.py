"""One kernel in place of several operations: its value, and the gradient of the parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.one_kernel import kernel_or_parts


def parts(x, slots, others):
    scaled = {name: values * x.sum() for name, values in others.items()}
    return x * 2.0 + slots, scaled


def kernel(x, slots, others):
    """Other numbers, so that one sees whose they are; it has no gradient."""
    value, scaled = parts(x, slots, others)
    return jax.lax.stop_gradient((value + 1, scaled))


ARGUMENTS = jnp.arange(3.0), jnp.array([1, 0, 2]), {"a": jnp.ones(2), "b": jnp.full(2, 3.0)}


@pytest.mark.parametrize("apply", [lambda function: function, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("its, more", [(kernel, 1.0), (lambda *_: None, 0.0)])
def test_a_value_is_the_kernels_if_there_is_one(its, more, apply):
    value, scaled = apply(lambda *args: kernel_or_parts(its, parts, *args))(*ARGUMENTS)
    expected, others = parts(*ARGUMENTS)
    np.testing.assert_array_equal(value, expected + more)
    jax.tree.map(np.testing.assert_array_equal, scaled, others)


@pytest.mark.parametrize("its", [kernel, lambda *_: None])
def test_a_gradient_is_that_of_the_parts(its):
    def loss(function, x, others):
        value, scaled = function(x, ARGUMENTS[1], others)
        return jnp.sum(value**2) + sum(map(jnp.sum, scaled.values()))

    def either(*args):
        return kernel_or_parts(its, parts, *args)

    found, expected = (
        jax.jit(jax.grad(lambda x, others, f=f: loss(f, x, others), argnums=(0, 1)))(
            ARGUMENTS[0], ARGUMENTS[2]
        )
        for f in (either, parts)
    )
    assert all(its.any() for its in jax.tree.leaves(expected))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
