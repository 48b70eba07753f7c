"""Row reductions: against the definition, and bits that follow from the row alone.

Off a GPU the kernels run in Pallas's interpreter.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_norm, implementation, log_sum_exp, rms_norm, row_dot, row_sum
from pallas_kernels.row_reduce import api, triton, xla
from tests.pallas_kernels.cases import in_layers

SHAPES = [(1, 8), (33, 128), (5, 100), (7, 2048), (3, 2560), (2, 20000)]
IMPLEMENTATIONS = ["xla", "triton"]
on_hopper = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the Mosaic GPU kernels need jax >= 0.11"
)


def pulled(function, dy, *arguments):
    """The gradients of its arguments, compiled at once."""
    return jax.jit(lambda dy, *its: jax.vjp(function, *its)[1](dy))(dy, *arguments)


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=0)
def reduced(implementation, x, weight, exponents):
    """A norm, a sum and a logarithm of a sum of every row."""
    named = dict(implementation=implementation)
    return (
        rms_norm(x, weight, 1e-6, **named),
        row_sum(x.astype(jnp.float32), **named),
        log_sum_exp(exponents, **named),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_the_definition(implementation, shape):
    x, weight, exponents = normal(*shape), normal(shape[1], seed=1), normal(*shape)
    exponents[:, ::3] = -np.inf
    normed, summed, logs = reduced(implementation, x, weight, exponents)
    wide = x.astype(np.float64)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-4)
    close(normed, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * weight)
    close(summed, wide.sum(1, keepdims=True))
    close(logs, np.log(np.exp(exponents.astype(np.float64)).sum(1)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", [pytest.param(8, marks=pytest.mark.slow), 96, 2560])
def test_bits_of_a_row_are_its_own(implementation, features):
    x, weight = normal(150, features, dtype="bfloat16"), normal(features, dtype="bfloat16")
    wide = x.astype(np.float32)
    together = reduced(implementation, x, weight, wide)
    for rows in (slice(0, 1), slice(17, 150)):
        alone = reduced(implementation, x[rows], weight, wide[rows])
        for part, whole in zip(alone, together, strict=True):
            np.testing.assert_array_equal(part, np.asarray(whole)[rows])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_of_a_sum_alone_are_its_own(implementation):
    """Many rows take a loop, where XLA may sum in another order: JAX 0.12 does so of one column."""
    x, run = normal(192, 64), jax.jit(functools.partial(row_sum, implementation=implementation))
    np.testing.assert_array_equal(run(x)[:64], run(x[:64]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dot_products_of_rows(dtype, implementation):
    """Bits too, with the fewest rows that XLA adds up in another order."""
    x, y = normal(192, 4, 32, dtype=dtype), normal(192, 4, 32, seed=1, dtype=dtype)
    dot = functools.partial(row_dot, implementation=implementation)
    run = jax.jit(dot)
    found = run(x, y)
    assert found.shape == (192, 4, 1) and found.dtype == jnp.float32
    expected = (x.astype(np.float64) * y.astype(np.float64)).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for rows in (slice(0, 1), slice(17, 33)):
        np.testing.assert_array_equal(run(x[rows], y[rows]), found[rows])
    for its, other in zip(pulled(dot, np.ones_like(found), x, y), (y, x), strict=True):
        np.testing.assert_array_equal(its, other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("features", "dtype"), [(96, "bfloat16"), (768, "bfloat16"), (9000, "float32")]
)
def test_scaled_and_dot(implementation, features, dtype):
    """The bits of both apart."""
    x, y = normal(70, features, dtype=dtype), normal(70, features, seed=1, dtype=dtype)
    scale = normal(70, 1, seed=2)
    run = jax.jit(functools.partial(api.scaled_and_dot, implementation=implementation))
    scaled, found = run(x, y, scale)
    assert scaled.dtype == y.dtype and found.dtype == jnp.float32
    np.testing.assert_array_equal(scaled, (x.astype(np.float32) * scale).astype(y.dtype))
    np.testing.assert_array_equal(found, row_dot(x, y, implementation=implementation))
    for rows in (slice(0, 1), slice(17, 70)):
        for part, whole in zip(run(x[rows], y[rows], scale[rows]), (scaled, found), strict=True):
            np.testing.assert_array_equal(part, np.asarray(whole)[rows])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logarithms_at_the_ends(implementation):
    """As JAX's own; a row of -inf alone has no gradient."""
    x = np.full((4, 10), -np.inf, np.float32)
    x[1, 3], x[2, :2], x[3] = np.inf, (1, 2), np.arange(10)
    run = functools.partial(log_sum_exp, implementation=implementation)
    np.testing.assert_allclose(run(x), jax.nn.logsumexp(x, axis=1), rtol=1e-6)
    (dx,) = pulled(run, np.ones(4, np.float32), x)
    np.testing.assert_array_equal(dx[0], np.zeros(10))
    np.testing.assert_allclose(dx[2:], jax.nn.softmax(x[2:], axis=1), rtol=1e-6)
    narrow = x[2:].astype(jnp.bfloat16)
    assert run(narrow).dtype == jnp.float32
    np.testing.assert_array_equal(run(narrow), run(x[2:]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(3, 4, 96), (2, 20000)])
def test_add_norm_is_both_after_each_other(implementation, shape):
    """With the same bits; so are the gradients."""
    x, more = (normal(*shape, seed=seed, dtype="bfloat16") for seed in (0, 1))
    weight, *weights = (normal(*its, dtype="bfloat16") for its in (shape[-1:], shape, shape))
    named = dict(implementation=implementation)

    def apart(x, more, weight):
        total = x + more
        return total, rms_norm(total, weight, 1e-6, **named)

    def together(x, more, weight):
        return add_norm(x, more, weight, 1e-6, **named)

    def with_gradients(function):
        y, pullback = jax.vjp(function, x, more, weight)
        return jax.tree.leaves((y, pullback(tuple(weights))))

    for its, expected in zip(with_gradients(together), with_gradients(apart), strict=True):
        np.testing.assert_array_equal(its, expected)


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
        jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1)))(x, weight)
        for name in ("triton", "xla")
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", [33, 128])
def test_bits_of_the_gradient_of_a_norm_are_its_rows(implementation, features):
    """With XLA's optimizations (in CI; JAX 0.11 or newer): one row is a loop of its own."""
    x, dy, weight = normal(20, features), normal(20, features, seed=1), normal(features, seed=2)
    norm = functools.partial(rms_norm, weight=weight, eps=1e-6, implementation=implementation)
    (together,) = pulled(norm, dy, x)
    for row in range(3):
        (alone,) = pulled(norm, dy[row : row + 1], x[row : row + 1])
        np.testing.assert_array_equal(alone, together[row : row + 1])


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
        of_rows = dy[:, 0].reshape(jax.eval_shape(plain, x).shape)
        (found,), (expected,) = (pulled(its, of_rows, x) for its in (function, plain))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    norm = functools.partial(rms_norm, eps=1e-6, implementation=implementation)
    found, expected = (pulled(its, dy, x, weight) for its in (norm, plain_norm))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", [96, 20000])
def test_gradients_of_a_norm(implementation, dtype, features):
    """Those of the definition in float32; a row has the same bits in another place."""
    x, dy, dtotal = (normal(9, features, seed=seed, dtype=dtype) for seed in range(3))
    weight = normal(features, seed=3, dtype=dtype)

    def gradient(rows):
        def both(x):
            named = dict(implementation=implementation)
            return add_norm(x, jnp.zeros_like(x), weight, 1e-6, **named)

        return jax.jit(lambda x, *d: jax.vjp(both, x)[1](d)[0])(x[rows], dtotal[rows], dy[rows])

    def definition(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * np.float32(weight)

    found = np.asarray(gradient(np.arange(9)))
    (expected,) = pulled(definition, np.float32(dy), np.float32(x))
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(
        np.float32(found), expected + np.float32(dtotal), rtol=tolerance, atol=tolerance
    )
    moved = np.roll(np.arange(9), 4)
    np.testing.assert_array_equal(gradient(moved), found[moved])


def of_hopper(function, *arguments):
    """The results of its kernels, which are interpreted elsewhere; the other implementation's."""
    from tests.pallas_kernels.gpu_interpreter import interpret

    def run(implementation):
        return jax.jit(functools.partial(function, eps=1e-6, implementation=implementation))

    kernel, expected = run("mosaic_gpu"), run("xla")(*arguments)
    interpreted = jax.default_backend() != "gpu"
    found = interpret(kernel, *arguments) if interpreted else kernel(*arguments)
    return jax.tree.map(np.asarray, found), expected


@on_hopper
@pytest.mark.interpreter
@pytest.mark.parametrize(
    "rows, features, dtype, layered",
    [
        (1, 256, "bfloat16", False),
        (3, 384, "bfloat16", True),
        (3, 256, "float32", True),
        (9, 7168, "bfloat16", True),
    ],
)
def test_hopper_kernels_are_the_definition(rows, features, dtype, layered):
    """Up to the order of the sum of squares; x + more is exact. Other layers' weights are NaN."""
    x, more = (normal(rows, features, seed=seed, dtype=dtype) for seed in (0, 1))
    weight = normal(features, seed=2, dtype=dtype)
    weight = in_layers(weight) if layered else weight
    tolerance = 2e-5 if dtype == "float32" else 2e-2  # the norm is rounded, and its product
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)

    (total, normed), (expected, expected_normed) = of_hopper(add_norm, x, more, weight)
    np.testing.assert_array_equal(total, expected)
    close(np.float32(normed), np.float32(expected_normed))
    found, expected = of_hopper(rms_norm, total[-1:], weight)
    close(np.float32(found), np.float32(expected))
    # A row alone, by the other kernel: its bits are those that it has among others.
    np.testing.assert_array_equal(found, normed[-1:])


@on_hopper
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((2, 100), "bfloat16"),
        ((2, 16384), "float32"),
        ((2, 16512), "bfloat16"),
        ((2, 256), "float16"),
        ((0, 256), "bfloat16"),
    ],
)
@pytest.mark.parametrize("platform, general", [("gpu", triton), ("cpu", xla)])
def test_norms_that_hopper_kernels_refuse(monkeypatch, platform, general, shape, dtype):
    """Asked for by name they say so; without a name another implementation serves them."""
    x = jnp.zeros(shape, dtype)
    with pytest.raises(NotImplementedError, match=rf"got x .*\[{shape[0]}, {shape[1]}\]"):
        rms_norm(x, jnp.zeros(shape[1], dtype), 1e-6, implementation="mosaic_gpu")
    monkeypatch.setattr(implementation, "platform_implementation", lambda: "mosaic_gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert api._backend_of_norms(None, x) is general


@on_hopper
def test_norms_on_hopper_have_kernels_of_their_own(monkeypatch):
    """Where they serve the rows, and nothing else is asked for; sums are Triton's."""
    from pallas_kernels.row_reduce import mosaic_gpu

    rows = jnp.zeros((2, 256), jnp.bfloat16)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(implementation, "platform_implementation", lambda: "xla")
    assert api._backend_of_norms(None, rows) is triton
    monkeypatch.setattr(implementation, "platform_implementation", lambda: "mosaic_gpu")
    assert api._backend_of_norms(None, rows) is mosaic_gpu
    assert api._backend_of_norms("triton", rows) is api._backend(None) is triton
    assert api._backend_of_norms("xla", rows) is xla
    for name in ("row_sum", "row_dot", "log_sum_exp"):
        assert getattr(mosaic_gpu, name) is getattr(triton, name)
