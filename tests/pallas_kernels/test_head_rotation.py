"""Norm, rotation and caching of heads; off a GPU the kernel runs in Pallas's interpreter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PageView, rotate_and_cache

PAGE, EPS = 8, 1e-6
# Request, position: two requests, a padding token, one past its page table.
TOKENS = [(1, 3), (1, 4), (0, 17), (-1, 0), (0, 24), (1, 0)]


def arguments(heads, kv_heads, width, dtype):
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    request, positions = jnp.asarray(TOKENS, jnp.int32).T
    angles = positions[:, None] * normal(1, width // 2, dtype="float32")
    view = PageView(request, positions, jnp.asarray([[4, 0, 2], [1, 3, 5]], jnp.int32))
    return (
        normal(len(TOKENS), heads + 2 * kv_heads, width),
        normal(width),
        normal(width),
        jnp.cos(angles),
        jnp.sin(angles),
        normal(6, PAGE, kv_heads, width),
        normal(6, PAGE, kv_heads, width),
        view,
    )


def expected(heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view):
    """The definition in float64."""
    kv_heads = k_pages.shape[2]
    heads, q_weight, k_weight, cos, sin = (
        None if a is None else np.asarray(a, np.float64)
        for a in (heads, q_weight, k_weight, cos, sin)
    )
    k_pages, v_pages = (np.array(a, np.float64) for a in (k_pages, v_pages))
    q, k, v = np.split(heads, [-2 * kv_heads, -kv_heads], axis=1)

    def rotated(x, weight):
        if weight is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight
        one, other = np.split(x, 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return np.concatenate([one * c - other * s, other * c + one * s], axis=-1)

    k = rotated(k, k_weight)
    for token, (request, position) in enumerate(TOKENS):
        if request >= 0 and position // PAGE < 3:
            place = int(view.page_tables[request, position // PAGE]), position % PAGE
            k_pages[place], v_pages[place] = k[token], v[token]
    return rotated(q, q_weight), k_pages, v_pages


def run(implementation):
    return jax.jit(functools.partial(rotate_and_cache, eps=EPS, implementation=implementation))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("sizes", [(8, 2, 16), (6, 3, 64), (1, 1, 128)])
def test_equal_the_definition(implementation, sizes):
    case = arguments(*sizes, "float32")
    for found, wanted in zip(run(implementation)(*case), expected(*case), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def without_norms(heads, q_weight, k_weight, *rest):
    return heads, None, None, *rest


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_heads_that_are_not_normed(implementation):
    case = without_norms(*arguments(8, 2, 16, "float32"))
    for found, wanted in zip(run(implementation)(*case), expected(*case), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_bits_of_a_token_are_its_own(implementation, normed):
    case = arguments(8, 2, 16, "bfloat16")
    *arrays, k_pages, v_pages, view = case if normed else without_norms(*case)
    heads, q_weight, k_weight, cos, sin = arrays
    together = run(implementation)(*arrays, k_pages, v_pages, view)
    q, keys, values = [], k_pages, v_pages
    for token in range(len(TOKENS)):
        one = slice(token, token + 1)
        alone = view._replace(request=view.request[one], positions=view.positions[one])
        its, keys, values = run(implementation)(
            heads[one], q_weight, k_weight, cos[one], sin[one], keys, values, alone
        )
        q.append(its)
    for found, wanted in zip((jnp.concatenate(q), keys, values), together, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_refusals_name_the_shapes():
    case = arguments(2, 1, 24, "float32")
    with pytest.raises(NotImplementedError, match="power of two"):
        rotate_and_cache(*case, eps=EPS, implementation="triton")
    with pytest.raises(NotImplementedError, match="'cuda' is not one of"):
        rotate_and_cache(*case, eps=EPS, implementation="cuda")
    with pytest.raises(ValueError, match="q_weight and k_weight"):
        rotate_and_cache(case[0], None, *case[2:], eps=EPS)


@pytest.mark.parametrize(
    "sizes, dtype, normed",
    [
        ((8, 2, 16), "float32", True),
        ((6, 3, 64), "bfloat16", True),
        ((6, 3, 64), "bfloat16", False),
        pytest.param((8, 2, 16), "bfloat16", True, marks=pytest.mark.slow),
        pytest.param((6, 3, 64), "float32", True, marks=pytest.mark.slow),
        pytest.param((8, 2, 16), "float32", False, marks=pytest.mark.slow),
        pytest.param((1, 1, 128), "float32", True, marks=pytest.mark.slow),
        pytest.param((1, 1, 128), "bfloat16", True, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_heads(sizes, dtype, normed):
    """Those of plain operations, in float32; of a padding token the query's alone."""
    case = arguments(*sizes, dtype)
    *arrays, k_pages, v_pages, view = case if normed else without_norms(*case)
    heads, q_weight, k_weight, cos, sin = arrays
    rng = np.random.default_rng(1)
    shapes = (len(TOKENS), sizes[0], sizes[2]), k_pages.shape, v_pages.shape
    gradients = tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)

    def pulled(implementation):
        def of_heads(heads):
            return run(implementation)(heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view)

        (found,) = jax.jit(lambda heads: jax.vjp(of_heads, heads)[1](gradients))(heads)
        return np.asarray(found, np.float32)

    def definition(heads):
        wide = [q_weight, k_weight]
        kv_heads, half = k_pages.shape[2], sizes[2] // 2
        q, k, v = jnp.split(heads, [sizes[0], sizes[0] + kv_heads], axis=1)

        def rotated(x, weight):
            if weight is not None:
                x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + EPS)
                x = x * weight.astype(jnp.float32)
            one, other = x[..., :half], x[..., half:]
            c, s = cos[:, None], sin[:, None]
            return jnp.concatenate([one * c - other * s, other * c + one * s], axis=-1)

        return rotated(q, wide[0]), rotated(k, wide[1]), v

    def of_token(pages, token):
        request, position = TOKENS[token]
        if request < 0 or position // PAGE >= 3:
            return np.zeros(pages.shape[2:], np.float32)
        page = view.page_tables[request, position // PAGE]
        return np.float32(pages[page, position % PAGE])

    dq, *pages = map(np.asarray, gradients)
    dk, dv = (np.stack([of_token(its, t) for t in range(len(TOKENS))]) for its in pages)
    pullback = jax.jit(lambda heads, *dy: jax.vjp(definition, heads)[1](dy))
    (wanted,) = pullback(heads.astype(jnp.float32), dq.astype(jnp.float32), dk, dv)
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    for implementation in ("xla", "triton"):
        found = pulled(implementation)
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
