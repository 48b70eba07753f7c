"""Norm, rotation and caching of latents; off a GPU the kernel runs in Pallas's interpreter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ColumnsOf, Layered, PageView, rotate_and_cache_latents

PAGE, EPS, FIRST = 8, 1e-6, 3
# Request, position: two requests, a padding token, one past its page table.
TOKENS = [(1, 3), (1, 4), (0, 17), (-1, 0), (0, 24), (1, 0)]
SIZES = (4, 16, 8, 32), (3, 24, 4, 48), (16, 128, 64, 512)  # heads, N, E, C


def arguments(heads, nope, rope, latent, dtype="float32"):
    """Queries and latents are parts of one array, whose first and last columns are NaN."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    width = heads * (nope + rope) + latent + rope
    joined = np.full((len(TOKENS), FIRST + width + 5), np.nan, jnp.dtype(dtype))
    joined[:, FIRST : FIRST + width] = normal(len(TOKENS), width)
    request, positions = jnp.asarray(TOKENS, jnp.int32).T
    angles = positions[:, None] * normal(1, rope // 2, dtype="float32")
    view = PageView(request, positions, jnp.asarray([[4, 0, 2], [1, 3, 5]], jnp.int32))
    pages = normal(6, PAGE, latent), normal(6, PAGE, rope)
    return jnp.asarray(joined), normal(latent), jnp.cos(angles), jnp.sin(angles), *pages, view


@functools.cache
def run(sizes, implementation, interleaved=True):
    heads, nope, rope, _ = sizes
    first = FIRST + heads * (nope + rope)
    static = dict(heads=heads, nope=nope, eps=EPS, interleaved=interleaved)

    def call(joined, *rest):
        q, kv = ColumnsOf(joined, FIRST), ColumnsOf(joined, first)
        return rotate_and_cache_latents(q, kv, *rest, **static, implementation=implementation)

    return jax.jit(call)


def expected(sizes, interleaved, joined, weight, cos, sin, latent_pages, rope_pages, view):
    """The definition in float64."""
    heads, nope, rope, latent = sizes
    joined, weight, cos, sin = (np.asarray(a, np.float64) for a in (joined, weight, cos, sin))
    ends = np.cumsum([FIRST, heads * (nope + rope), latent, rope])
    _, q, c, k, _ = np.split(joined, ends, axis=1)
    q = q.reshape(len(TOKENS), heads, nope + rope)

    def rotated(x):
        one, other = (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
        both = one * cos[:, None] - other * sin[:, None], other * cos[:, None] + one * sin[:, None]
        return np.concatenate(both, axis=-1)

    c = c / np.sqrt((c**2).mean(-1, keepdims=True) + EPS) * weight
    pages = [np.array(a, np.float64) for a in (latent_pages, rope_pages)]
    for token, (request, position) in enumerate(TOKENS):
        if request >= 0 and position // PAGE < 3:
            place = int(view.page_tables[request, position // PAGE]), position % PAGE
            pages[0][place], pages[1][place] = c[token], rotated(k[:, None])[token, 0]
    return q[..., :nope], rotated(q[..., nope:]), *pages


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_equal_the_definition(sizes, interleaved, implementation):
    case = arguments(*sizes)
    found = run(sizes, implementation, interleaved)(*case)
    for its, wanted in zip(found, expected(sizes, interleaved, *case), strict=True):
        np.testing.assert_allclose(its, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_bits_of_a_token_are_its_own(implementation):
    sizes = SIZES[0]
    *rows, cache, rope_cache, view = arguments(*sizes, "bfloat16")
    joined, weight, cos, sin = rows
    together = run(sizes, implementation)(*rows, cache, rope_cache, view)
    queries = []
    for token in range(len(TOKENS)):
        one = slice(token, token + 1)
        alone = view._replace(request=view.request[one], positions=view.positions[one])
        its = joined[one], weight, cos[one], sin[one], cache, rope_cache, alone
        *q, cache, rope_cache = run(sizes, implementation)(*its)
        queries.append(q)
    alone = *map(jnp.concatenate, zip(*queries, strict=True)), cache, rope_cache
    for found, wanted in zip(alone, together, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_the_weight_of_a_layer_of_several(implementation):
    sizes = SIZES[0]
    joined, weight, *rest = arguments(*sizes)
    stack = jnp.stack([jnp.full_like(weight, np.nan), weight, jnp.full_like(weight, np.nan)])
    layered = run(sizes, implementation)(joined, Layered(stack, 0, 1), *rest)
    for found, wanted in zip(
        layered, run(sizes, implementation)(joined, weight, *rest), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients(interleaved, implementation):
    """Those of the definition, by differences along a random direction in float64."""
    sizes = SIZES[0]
    joined, weight, cos, sin, *pages, view = arguments(*sizes)
    joined = jnp.nan_to_num(joined)
    call = run(sizes, implementation, interleaved)

    def of(joined, weight, *pages):
        return call(joined, weight, cos, sin, *pages, view)

    inputs, rng = (joined, weight, *pages), np.random.default_rng(2)
    y, pull = jax.vjp(of, *inputs)
    dy = tuple(rng.standard_normal(its.shape).astype(np.float32) for its in y)
    gradients = pull(tuple(map(jnp.asarray, dy)))
    step = [rng.standard_normal(its.shape) for its in inputs]

    def at(size):
        moved = [np.asarray(a, np.float64) + size * b for a, b in zip(inputs, step, strict=True)]
        found = expected(sizes, interleaved, *moved[:2], cos, sin, *moved[2:], view)
        return sum((np.asarray(a) * b).sum() for a, b in zip(found, dy, strict=True))

    slope = sum((np.asarray(a, np.float64) * b).sum() for a, b in zip(gradients, step, strict=True))
    np.testing.assert_allclose(slope, (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-4)


def test_pages_that_are_wider_than_keys():
    """As on TPUs: zeros are after them, and after the queries' part."""
    sizes = SIZES[0]
    *rest, rope_pages, view = arguments(*sizes)
    wider = jnp.pad(rope_pages, ((0, 0), (0, 0), (0, 24)))
    q_nope, q_rope, latents, keys = run(sizes, "xla")(*rest, wider, view)
    assert not np.asarray(q_rope[..., 8:]).any() and not np.asarray(keys[..., 8:]).any()
    found = q_nope, q_rope[..., :8], latents, keys[..., :8]
    for its, wanted in zip(found, run(sizes, "xla")(*rest, rope_pages, view), strict=True):
        np.testing.assert_array_equal(its, wanted)
    with pytest.raises(NotImplementedError, match="pages must have E columns"):
        run(sizes, "triton")(*rest, wider, view)
    with pytest.raises(NotImplementedError, match="'cuda' is not one of"):
        run(sizes, "cuda")(*rest, wider, view)
