"""Attention by heads of latents: its gradient against that of the absorbed form, and isolation."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KvB, Lora, PageView, latent_attention, write_pages

PAGE, SLOTS, RANK, SCALE = 16, 3, 3, 0.3
LENGTHS, ADAPTERS = (37, 70, 5), (1, -1, 0)  # of each request
TOKENS, PADDING = 130, 7


class Sizes(NamedTuple):
    heads: int
    nope: int
    rope: int
    value: int
    latent: int


SMALL, DEEPSEEK = Sizes(4, 6, 4, 5, 10), Sizes(4, 128, 64, 128, 512)


def normal(seed: int, *shape: int, scale: float = 1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def kv_b(adapters=True, classes=False, sizes=SMALL) -> KvB:
    """Weights with which softmax is not of one token alone."""
    s, small = sizes, functools.partial(normal, scale=sizes.latent**-0.5)
    if not adapters:
        k_up, v_up = small(1, s.heads, s.latent, s.nope), small(2, s.heads, s.value, s.latent)
        return KvB(k_up, v_up, None, None)
    a, scaling = small(3, SLOTS, 1, RANK, s.latent), np.float32([[0.5], [2.0], [1.0]])
    b_key = normal(4, SLOTS, s.heads, RANK, s.nope, scale=0.3)
    b_value = normal(5, SLOTS, s.heads, RANK, s.value, scale=0.3)
    key, value = Lora(b_key, a, scaling), Lora(a, b_value, scaling)
    if classes:  # the first slot alone, and the others
        key, value = (
            tuple(Lora(*(its[part] for its in pair)) for part in (slice(0, 1), slice(1, None)))
            for pair in (key, value)
        )
    return kv_b(adapters=False, sizes=sizes)._replace(key_lora=key, value_lora=value)


def batch(requests=(0, 1, 2), fill=0.0, sizes=SMALL):
    """Queries, latents and rope keys of tokens, their view and slots; padding among them."""
    s = sizes
    shapes = (s.heads, s.nope), (s.heads, s.rope), (s.latent,), (s.rope,)
    arrays = [np.full((TOKENS, *shape), fill, np.float32) for shape in shapes]
    request, positions = np.full(TOKENS, -1, np.int32), np.zeros(TOKENS, np.int32)
    slots, spans, start = np.full(TOKENS, -1, np.int32), {}, PADDING
    for r in requests:
        span = spans[r] = slice(start, start + LENGTHS[r])
        request[span], positions[span], slots[span] = r, np.arange(LENGTHS[r]), ADAPTERS[r]
        for number, array in enumerate(arrays):
            array[span] = normal(100 * r + number, LENGTHS[r], *array.shape[1:])
        start = span.stop
    tables = np.arange(15, dtype=np.int32).reshape(3, 5)
    return arrays, PageView(request, positions, tables), slots, spans


def attend(view, slots, weights, q_nope, q_rope, latent, rope, key_lora, value_lora):
    pages = [
        write_pages(jnp.zeros((15, PAGE, x.shape[1]), x.dtype), x, view) for x in (latent, rope)
    ]
    its = weights._replace(key_lora=key_lora, value_lora=value_lora)
    return latent_attention(q_nope, q_rope, *pages, view, its, slots, scale=SCALE)


def textbook(view, slots, weights, q_nope, q_rope, latent, rope, key_lora, value_lora):
    """Keys and values of all tokens, each with its own adapter's weights; no kernels."""

    def merged(base, outer, inner, scaling):
        """[T, H, out, latent]"""
        own = jnp.einsum("shro,srl->shol", outer, inner) * scaling[:, :, None, None]
        own = jnp.concatenate([own, jnp.zeros_like(own[:1])])  # the last is of no adapter
        return base + own[slots]

    if key_lora is None:
        w_key = jnp.swapaxes(weights.k_up, 1, 2)[None]
        w_value = weights.v_up[None]
    else:
        key, value = (joined(its) for its in (key_lora, value_lora))
        w_key = merged(jnp.swapaxes(weights.k_up, 1, 2), key.a, key.b[:, 0], key.scaling)
        w_value = merged(weights.v_up, value.b, value.a[:, 0], value.scaling)
    w_key, w_value = (jnp.broadcast_to(w, (len(latent), *w.shape[1:])) for w in (w_key, w_value))
    k, v = (jnp.einsum("thol,tl->tho", w, latent) for w in (w_key, w_value))
    scores = jnp.einsum("qhd,khd->hqk", q_nope, k) + jnp.einsum("qhd,kd->hqk", q_rope, rope)
    seen = (view.request[:, None] == view.request) & (view.positions[:, None] >= view.positions)
    weight = jax.nn.softmax(jnp.where(seen, scores * SCALE, -1e30), -1)
    out = jnp.einsum("hqk,khd->qhd", weight, v)
    return jnp.where((view.request >= 0)[:, None, None], out, 0)


def joined(slots) -> Lora:
    """All rank classes in one."""
    if isinstance(slots, Lora):
        return slots
    return Lora(*map(jnp.concatenate, zip(*slots, strict=True)))


def pull(function, weights, arrays, view, slots, dout):
    """The result, and the gradients of arrays and adapters."""
    call = functools.partial(function, view, slots, weights)
    y, back = jax.vjp(call, *arrays, weights.key_lora, weights.value_lora)
    return y, back(dout)


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("adapters", "rank classes")),
        "none",
    ],
)
def test_values_and_gradients_are_the_textbooks(kind):
    weights = kv_b(kind != "none", kind == "rank classes")
    arrays, view, slots, _ = batch()
    dout = np.where(
        (view.request >= 0)[:, None, None], normal(9, TOKENS, SMALL.heads, SMALL.value), 0
    )
    y, found = jax.jit(functools.partial(pull, attend))(weights, arrays, view, slots, dout)
    with jax.default_matmul_precision("highest"):
        right, expected = pull(textbook, weights, arrays, view, slots, dout)
    np.testing.assert_allclose(y, right, atol=2e-5)
    real = view.request >= 0
    for its, other in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_allclose(its[real], other[real], atol=2e-5, rtol=1e-5)
        assert not its[~real].any()
    leaves = zip(*map(jax.tree.leaves, (found[4:], expected[4:])), strict=True)
    for its, other in leaves:
        np.testing.assert_allclose(its, other, atol=2e-4, rtol=1e-5)


def test_gradients_of_a_request_are_its_own():
    """Alone or beside others, and beside an adapter and tokens that are not numbers."""
    run = jax.jit(functools.partial(pull, attend))

    def gradients(weights, requests, fill):
        arrays, view, slots, spans = batch(requests, fill)
        dout = np.full((TOKENS, SMALL.heads, SMALL.value), fill, np.float32)
        for r in (0, 1):
            dout[spans[r]] = normal(r, LENGTHS[r], SMALL.heads, SMALL.value)
        _, found = run(weights, arrays, view, slots, dout)
        of_tokens = [np.asarray(x[spans[r]]) for r in (0, 1) for x in found[:4]]
        of_slot = [np.asarray(x[ADAPTERS[0]]) for x in jax.tree.leaves(found[4:])]
        return of_tokens, of_slot

    weights = kv_b()
    broken = jax.tree.map(np.copy, weights)
    for leaf in jax.tree.leaves((broken.key_lora, broken.value_lora)):
        leaf[ADAPTERS[2]] = np.nan
    alone = gradients(weights, (0, 1), 0.0)
    assert all(np.isfinite(x).all() and x.any() for x in jax.tree.leaves(alone))
    for its, other in (
        (gradients(broken, (0, 1, 2), np.nan), alone),
        (gradients(broken, (1, 2, 0), 1.0), alone),
    ):
        for x, y in zip(jax.tree.leaves(its), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("sizes", [SMALL, pytest.param(DEEPSEEK, marks=pytest.mark.slow)])
def test_bfloat16(sizes):
    """On a GPU kernels serve the larger ones."""
    weights, (arrays, view, slots, _) = kv_b(sizes=sizes), batch(sizes=sizes)
    narrow = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.bfloat16))
    wide = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    scaling = weights.key_lora.scaling
    weights, arrays = narrow(weights), narrow(arrays)
    dout = narrow(normal(9, TOKENS, sizes.heads, sizes.value))
    dout = jnp.where((view.request >= 0)[:, None, None], dout, 0)
    exact = wide((weights, arrays, dout))
    weights = weights._replace(
        key_lora=weights.key_lora._replace(scaling=scaling),
        value_lora=weights.value_lora._replace(scaling=scaling),
    )
    found = jax.jit(functools.partial(pull, attend))(weights, arrays, view, slots, dout)
    with jax.default_matmul_precision("highest"):
        weights, arrays, dout = exact
        expected = pull(textbook, weights, arrays, view, slots, dout)
    for its, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        its, right = (np.asarray(x, np.float32) for x in (its, right))
        if right.ndim > 2 and len(right) == TOKENS:
            its, right = its[view.request >= 0], right[view.request >= 0]
        assert np.linalg.norm(its - right) <= 0.02 * np.linalg.norm(right)


def test_shapes_that_do_not_belong_together():
    arrays, view, slots, _ = batch()
    arrays, view, weights = jax.tree.map(jnp.asarray, (arrays, view, kv_b()))
    with pytest.raises(ValueError, match="k_up must be"):
        attend(view, slots, weights, arrays[0][..., :-1], *arrays[1:], *weights[2:])
    with pytest.raises(ValueError, match="token_slots must be"):
        attend(view, slots[:-1], weights, *arrays, *weights[2:])
