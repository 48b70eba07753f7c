"""Gradients of attention over whole sequences against plain dense attention, and their bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PageView, paged_attention, paged_latent_attention, write_pages

PAGE, HEADS, KV_HEADS, WIDTH, LATENT, ROPE = 16, 4, 2, 6, 10, 4
SHAPES = {
    "heads": ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, WIDTH)),
    "latent": ((HEADS, LATENT + ROPE), (LATENT,), (ROPE,)),
}
SHAPES["sinks"] = SHAPES["heads"]
SINKS = np.array([-30, 0, 2, 5], np.float32)


def view_of(lengths: list[int], tokens: int) -> PageView:
    """Sequences one after the other from position 0, then padding."""
    request, positions = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    tables, start, page = np.zeros((3, tokens // PAGE), np.int32), 0, 0
    for i, length in enumerate(lengths):
        request[start : start + length] = i
        positions[start : start + length] = np.arange(length)
        needed = -(-length // PAGE)
        tables[i, :needed] = page + np.arange(needed)
        start, page = start + length, page + needed
    return PageView(*map(jnp.asarray, (request, positions, tables)))


def attend(kind: str, view: PageView, window: int | None, q, first, second):
    caches = [
        write_pages(jnp.zeros((view.page_tables.size, PAGE, *x.shape[1:]), x.dtype), x, view)
        for x in (first, second)
    ]
    if kind != "latent":
        sinks = SINKS if kind == "sinks" else None
        return paged_attention(q, *caches, view, scale=0.4, sliding_window=window, sinks=sinks)
    parts = q[..., :LATENT], q[..., LATENT:]
    return paged_latent_attention(*parts, *caches, view, scale=0.4)


def dense(kind: str, view: PageView, window: int | None, q, first, second):
    if kind != "latent":
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (first, second))
    else:
        k = jnp.repeat(jnp.concatenate([first, second], 1)[:, None], HEADS, axis=1)
        v = k[..., :LATENT]
    apart = view.positions[:, None] - view.positions
    visible = (view.request[:, None] == view.request) & (apart >= 0)
    if window is not None:
        visible &= apart < window
    scores = jnp.where(visible, jnp.einsum("qhd,khd->hqk", q, k) * 0.4, -1e30)
    sinks = SINKS if kind == "sinks" else np.full(HEADS, -1e30, np.float32)
    sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), -1)[..., :-1]
    out = jnp.einsum("hqk,khd->qhd", weights, v)
    return jnp.where((view.request >= 0)[:, None, None], out, 0)


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def gradients(function, kind, view, window, values, dout):
    def run(*values):
        return function(kind, view, window, *values)

    return jax.vjp(run, *values)[1](dout)


def normal(tokens: int, shape: tuple[int, ...], seed: int):
    values = np.random.default_rng(seed).standard_normal((tokens, *shape))
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize(
    "kind, window", [("heads", None), ("heads", 37), ("sinks", 37), ("latent", None)]
)
def test_equal_those_of_dense_attention(kind, window):
    tokens, view = 224, view_of([70, 130, 5], 224)
    values = [normal(tokens, shape, i) for i, shape in enumerate(SHAPES[kind])]
    out_width = LATENT if kind == "latent" else WIDTH
    dout = normal(tokens, (HEADS, out_width), 9)
    found = gradients(attend, kind, view, window, values, dout)
    with jax.default_matmul_precision("highest"):  # a GPU's own is less than that of the loop
        expected = gradients(dense, kind, view, window, values, dout)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_bits_are_those_of_the_sequence_alone(kind):
    """Whatever lies beside it, NaN included, and wherever it lies."""
    lengths, out_width = [70, 130, 5], LATENT if kind == "latent" else WIDTH
    shapes = (*SHAPES[kind], (HEADS, out_width))
    own = [normal(130, shape, i) for i, shape in enumerate(shapes)]

    def run(lengths: list[int], at: int, fill: float):
        start = sum(lengths[:at])
        *values, dout = (
            jnp.full((224, *x.shape[1:]), fill, x.dtype).at[start : start + 130].set(x) for x in own
        )
        found = gradients(attend, kind, view_of(lengths, 224), None, values, dout)
        return [np.asarray(x[start : start + 130]) for x in found]

    alone = run([130], 0, 0.0)
    assert all(np.isfinite(x).all() and x.any() for x in alone)
    for fill in (1.0, np.nan):
        for at, order in ((1, lengths), (0, [130, 70, 5]), (2, [70, 5, 130])):
            for x, y in zip(run(order, at, fill), alone, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="XLA chooses products by their sizes")
@pytest.mark.parametrize("kind", ["heads", "sinks", "latent"])
def test_bits_do_not_depend_on_how_many_others_there_are(kind):
    """With XLA's optimizations (in CI): loops over other numbers of tiles."""
    shapes = [(HEADS, 32), (KV_HEADS, 32), (KV_HEADS, 32), (HEADS, 32)]
    if kind == "latent":
        shapes = [*SHAPES[kind], (HEADS, LATENT)]
    for length, others in ((64, 20), (130, 6)):
        tokens = length * (others + 1)
        *values, dout = (normal(tokens, shape, i) for i, shape in enumerate(shapes))
        request, positions = np.divmod(np.arange(tokens, dtype=np.int32), length)
        tables = np.arange((others + 1) * -(-length // PAGE), dtype=np.int32)
        view = PageView(*map(jnp.asarray, (request, positions, tables.reshape(others + 1, -1))))
        own = PageView(view.request[:length], view.positions[:length], view.page_tables[:1])
        beside = gradients(attend, kind, view, None, values, dout)
        alone = gradients(attend, kind, own, None, [x[:length] for x in values], dout[:length])
        for x, y in zip(beside, alone, strict=True):
            np.testing.assert_array_equal(x[:length], y)
