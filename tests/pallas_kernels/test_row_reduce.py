"""Row reductions: against the definition, and bits that follow from the row alone.

Off a GPU the kernels run in Pallas's interpreter.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import log_sum_exp, rms_norm, row_sum

SHAPES = [(1, 8), (33, 128), (5, 100), (7, 2048), (3, 2560), (2, 20000)]
IMPLEMENTATIONS = ["xla", "triton"]


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_the_definition(implementation, shape):
    x, weight = normal(*shape), normal(shape[1], seed=1)
    wide = np.asarray(x, np.float64)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-4)
    close(row_sum(x, implementation=implementation), wide.sum(1, keepdims=True))
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * np.asarray(weight)
    close(rms_norm(x, weight, 1e-6, implementation=implementation), normed)
    x = x.at[:, ::3].set(-jnp.inf)
    expected = np.log(np.exp(np.asarray(x, np.float64)).sum(1))
    close(log_sum_exp(x, implementation=implementation), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", [8, 96, 2560])
def test_bits_of_a_row_are_its_own(implementation, features):
    x, weight = normal(150, features, dtype="bfloat16"), normal(features, dtype="bfloat16")
    wide = x.astype(jnp.float32)

    @jax.jit
    def run(x, wide):
        named = dict(implementation=implementation)
        return (
            rms_norm(x, weight, 1e-6, **named),
            row_sum(wide, **named),
            log_sum_exp(wide, **named),
        )

    together = run(x, wide)
    for rows in (slice(0, 1), slice(3, 20), slice(17, 150)):
        for part, whole in zip(run(x[rows], wide[rows]), together, strict=True):
            np.testing.assert_array_equal(part, whole[rows])


@pytest.mark.parametrize("heads", [3, 5])
def test_leading_axes_are_kept(heads):
    x = normal(4, heads, 16)
    assert row_sum(x).shape == (4, heads, 1)
    flat = rms_norm(x.reshape(-1, 16), jnp.ones(16), 1e-6)
    np.testing.assert_array_equal(rms_norm(x, jnp.ones(16), 1e-6).reshape(-1, 16), flat)


def test_gradients():
    x, weight, dy = normal(5, 100), normal(100, seed=1), normal(5, 100, seed=2)

    def loss(implementation, x, weight):
        named = dict(implementation=implementation)
        normed = rms_norm(x, weight, 1e-6, **named)
        return (
            (normed * dy).sum()
            + row_sum(x * x * x, **named).sum()
            + (log_sum_exp(x, **named) * dy[:, 0]).sum()
        )

    found, expected = (
        jax.grad(functools.partial(loss, name), argnums=(0, 1))(x, weight)
        for name in ("triton", "xla")
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_unknown_implementations_are_refused():
    with pytest.raises(NotImplementedError, match="'cuda' is not one of"):
        row_sum(normal(2, 3), implementation="cuda")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_those_of_the_definition(implementation):
    x, weight, dy = normal(5, 100), normal(100, seed=1), normal(5, 100, seed=2)

    def plain_norm(x, weight):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    pairs = [
        (functools.partial(row_sum, implementation=implementation), lambda x: x.sum(1)[:, None]),
        (
            functools.partial(log_sum_exp, implementation=implementation),
            lambda x: jax.nn.logsumexp(x, axis=1),
        ),
    ]
    for function, plain in pairs:
        y, pullback = jax.vjp(plain, x)
        of_rows = dy[:, 0].reshape(y.shape)
        (found,), (expected,) = jax.vjp(function, x)[1](of_rows), pullback(of_rows)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    norm = functools.partial(rms_norm, eps=1e-6, implementation=implementation)
    found, expected = jax.vjp(norm, x, weight)[1](dy), jax.vjp(plain_norm, x, weight)[1](dy)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
