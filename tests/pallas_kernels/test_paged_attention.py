"""Paged attention, for heads and for latents, against `reference.py`; its exactness, isolation."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import PageView, paged_attention, paged_latent_attention, write_pages
from pallas_kernels.paged_attention import reference

LENGTHS = (150, 70, 9)  # cached positions of each request: three, two and one blocks of keys
PAGES, MAX_LENGTH = {4: 80, 16: 24, 32: 14}, 160  # pages of the cache for each page size
HEADS, KV_HEADS, WIDTH, V_WIDTH, LATENT, ROPE = 4, 2, 12, 10, 20, 6
SINKS = np.array([-30, 0, 5, 40], np.float32)  # that take no weight, some, most and all


class Sequences(NamedTuple):
    """What a batch reads, by request and position, whatever the pages are."""

    q: np.ndarray  # [requests, positions, heads, width]
    k: np.ndarray
    v: np.ndarray


@functools.cache
def sequences(kind: str, dtype: str = "float32") -> Sequences:
    rng = np.random.default_rng(0)
    shapes = (HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, V_WIDTH)
    if kind == "latent":
        # The query is its two parts side by side.
        shapes = (HEADS, LATENT + ROPE), (LATENT,), (ROPE,)
    return Sequences(
        *(
            (2 * rng.standard_normal((3, MAX_LENGTH, *shape))).astype(jnp.dtype(dtype))
            for shape in shapes
        )
    )


class Batch(NamedTuple):
    q: np.ndarray
    first: np.ndarray
    second: np.ndarray
    view: PageView


def make_batch(kind, request, positions, page_size=16, seed=0, fill=np.nan, dtype="float32"):
    """The cache holds every request's LENGTHS; all other positions hold `fill`."""
    data = sequences(kind, dtype)
    rng = np.random.default_rng(seed)
    pages_per_request = MAX_LENGTH // page_size
    free = rng.permutation(PAGES[page_size])
    # Unused entries of the tables may name any page.
    tables = rng.integers(0, PAGES[page_size], (3, pages_per_request)).astype(np.int32)
    for b, length in enumerate(LENGTHS):
        used = -(-length // page_size)
        tables[b, :used], free = free[:used], free[used:]
    caches = []
    for values in (data.k, data.v):
        pages = np.full((PAGES[page_size], page_size, *values.shape[2:]), fill, values.dtype)
        for b, length in enumerate(LENGTHS):
            p = np.arange(length)
            pages[tables[b, p // page_size], p % page_size] = values[b, :length]
        caches.append(pages)
    request, positions = np.asarray(request, np.int32), np.asarray(positions, np.int32)
    q = data.q[request, positions]
    q[request < 0] = np.nan
    return Batch(q, *caches, PageView(request, positions, tables))


@functools.cache
def jitted(kind, window=None):
    if kind != "latent":
        return jax.jit(functools.partial(paged_attention, **options(kind, window)))
    return jax.jit(
        lambda q, first, second, view: paged_latent_attention(
            q[..., :LATENT], q[..., LATENT:], first, second, view, scale=0.2
        )
    )


def options(kind, window):
    """Of heads."""
    sinks = SINKS if kind == "sinks" else None
    return dict(scale=WIDTH**-0.5, sliding_window=window, sinks=sinks)


def run(kind, batch, window=None):
    return np.asarray(jitted(kind, window)(*batch))


def expected(kind, batch, window=None):
    if kind != "latent":
        return reference.paged_attention(*batch, **options(kind, window))
    q, first, second, view = batch
    return reference.paged_latent_attention(
        q[..., :LATENT], q[..., LATENT:], first, second, view, scale=0.2
    )


TOKENS = 21
EVERY_TOKEN = [(b, p) for b, length in enumerate(LENGTHS) for p in range(length)]


@st.composite
def token_lists(draw):
    """21 tokens of any requests and positions, in any order, with padding among them."""
    tokens = draw(
        st.lists(
            st.one_of(st.sampled_from(EVERY_TOKEN), st.just((-1, 0)), st.just((-1, 149))),
            min_size=TOKENS,
            max_size=TOKENS,
        )
    )
    return np.array(tokens).T


@pytest.mark.parametrize(
    "kind, window",
    [
        ("heads", None),
        ("heads", 1),
        ("heads", 5),
        ("heads", 100),
        ("sinks", None),
        ("sinks", 5),
        ("latent", None),
    ],
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_equals_the_definition(kind, window, data):
    """All that is not cached is NaN: other positions of the pages, pages nobody owns, padding."""
    request, positions = data.draw(token_lists())
    batch = make_batch(kind, request, positions, seed=data.draw(st.integers(0, 99)))
    found = run(kind, batch, window)
    padding = request < 0
    assert found.dtype == np.float32 and not found[padding].any()
    reference_q = np.where(padding[:, None, None], 0, batch.q)
    np.testing.assert_allclose(
        found, expected(kind, batch._replace(q=reference_q), window), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_bfloat16(kind):
    request, positions = np.array(EVERY_TOKEN[::11]).T
    batch = make_batch(kind, request, positions, dtype="bfloat16")
    found = run(kind, batch)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        found.astype(np.float32), expected(kind, batch), rtol=2**-8, atol=2**-7
    )


def everything(kind, **options):
    """The result of every cached token, by (request, position)."""
    request, positions = np.array(EVERY_TOKEN).T
    found = run(kind, make_batch(kind, request, positions, **options))
    return dict(zip(EVERY_TOKEN, found, strict=True))


@functools.cache
def all_tokens(kind):
    return everything(kind)


@pytest.mark.parametrize("count", [1, 7, 8, 21, 64])
@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_bits_do_not_depend_on_the_batch(kind, count):
    """Prefill of everything against small mixed batches of any number of tokens."""
    for seed in range(3):
        chosen = np.random.default_rng(seed).permutation(len(EVERY_TOKEN))[:count]
        tokens = [EVERY_TOKEN[i] for i in chosen]
        found = run(kind, make_batch(kind, *np.array(tokens).T, seed=seed))
        for token, value in zip(tokens, found, strict=True):
            assert np.array_equal(value, all_tokens(kind)[token]), token


@pytest.mark.parametrize("page_size", [4, 32])
@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_bits_do_not_depend_on_the_page_size(kind, page_size):
    found = everything(kind, page_size=page_size)
    assert all(np.array_equal(found[token], all_tokens(kind)[token]) for token in EVERY_TOKEN)


@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_bits_do_not_depend_on_page_numbers_or_what_others_hold(kind):
    found = everything(kind, seed=5, fill=1e4)
    assert all(np.array_equal(found[token], all_tokens(kind)[token]) for token in EVERY_TOKEN)


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_token_sees_its_own_positions_alone(window, value):
    """Everything outside of one token's view is poisoned, its own request's future included."""
    request, positions = np.zeros(TOKENS, int), np.full(TOKENS, 130)
    batch = make_batch("heads", request, positions)
    p = np.arange(131)[-window:] if window else np.arange(131)
    page, offset = batch.view.page_tables[0, p // 16], p % 16
    caches = []
    for pages in (batch.first, batch.second):
        poisoned = np.full_like(pages, value)
        poisoned[page, offset] = pages[page, offset]
        caches.append(poisoned)
    clean = run("heads", batch, window)
    found = run("heads", batch._replace(first=caches[0], second=caches[1]), window)
    assert np.isfinite(clean).all() and np.array_equal(found, clean)


@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_a_poisoned_request_stays_alone(kind):
    tokens = np.resize(np.array(EVERY_TOKEN[::7]), (TOKENS, 2))
    tokens[::4] = (1, 60)
    batch = make_batch(kind, *tokens.T)
    owned = batch.view.page_tables[1, :5]  # all that request 1 has cached
    poisoned = [np.array(pages) for pages in (batch.first, batch.second)]
    for pages in poisoned:
        pages[owned] = np.nan
    others = tokens[:, 0] != 1
    q = np.where(others[:, None, None], batch.q, np.nan)
    found = run(kind, Batch(q, *poisoned, batch.view))
    assert np.array_equal(found[others], run(kind, batch)[others])
    assert np.isnan(found[~others]).all()


@pytest.mark.parametrize("count", [1, 21])
def test_bits_with_sinks_do_not_depend_on_the_batch(count):
    test_bits_do_not_depend_on_the_batch("sinks", count)


def test_sinks_are_one_for_each_head():
    batch = make_batch("heads", [0], [0])
    with pytest.raises(ValueError, match=r"each of 4 heads, got \(3,\)"):
        paged_attention(*batch, scale=1.0, sinks=SINKS[:3])


def test_a_window_wider_than_the_context_changes_nothing():
    request, positions = np.array(EVERY_TOKEN[140:161]).T  # the end of request 0, the start of 1
    batch = make_batch("heads", request, positions)
    assert np.array_equal(run("heads", batch, 1000), run("heads", batch))


@pytest.mark.parametrize("page_size", [4, 16])
def test_written_values_are_read_back(page_size):
    """In any order; padding tokens write nothing, wherever they point."""
    rng = np.random.default_rng(1)
    tokens = np.array(EVERY_TOKEN)[rng.permutation(len(EVERY_TOKEN))]
    padding = rng.random(len(tokens)) < 0.1
    request = np.where(padding, -1, tokens[:, 0])
    batch = make_batch("heads", request, tokens[:, 1], page_size=page_size, fill=7)
    values = sequences("heads").k[tokens[:, 0], tokens[:, 1]].astype(np.float64)
    values[padding] = np.nan
    empty = np.full_like(batch.first, 7)
    found = np.asarray(jax.jit(write_pages)(empty, values.astype(np.float32), batch.view))
    written = np.array(batch.first)
    where = tokens[padding]
    page = batch.view.page_tables[where[:, 0], where[:, 1] // page_size]
    written[page, where[:, 1] % page_size] = 7
    assert np.array_equal(found, written)


def test_what_is_outside_of_the_tables_writes_nothing():
    """Positions before the first and past the last, and requests that have no table."""
    request, positions = np.array([0, 0, 0, 2, -1]), np.array([-1, 4, 1, 0, 0])
    view = PageView(request, positions, np.array([[0, 1], [2, 3]]))
    written = write_pages(np.zeros((4, 2), np.float32), np.ones(5, np.float32), view)
    assert np.flatnonzero(written).tolist() == [1]


def test_written_values_take_the_dtype_of_the_pages():
    batch = make_batch("latent", [0, 2], [3, 8], dtype="bfloat16")
    values = np.full((2, LATENT), 1 + 2**-10, np.float32)
    found = jax.jit(write_pages)(batch.first, values, batch.view)
    assert found.dtype == jnp.bfloat16
    page, offset = batch.view.page_tables[[0, 2], [0, 0]], [3, 8]
    assert (np.asarray(found, np.float32)[page, offset] == 1).all()
