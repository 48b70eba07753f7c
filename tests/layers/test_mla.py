"""Absorbed latent attention against the textbook form: heads expanded, weights merged."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_moe_jax.config.model import RopeConfig
from lora_moe_jax.layers.adapter_slots import LoraParam
from lora_moe_jax.layers.build import Build, SlotConfig
from lora_moe_jax.layers.cache import LayerCache, single_sequence_cache
from lora_moe_jax.layers.mla import AbsorbedKvB, KeyRows, LatentAttention, ValueRows
from lora_moe_jax.layers.rope import attention_factor, inverse_frequencies
from pallas_kernels import PageView, latent_attention
from tests.layers.modules import (
    CONFIG,
    MLA,
    build,
    merged,
    normal,
    randomise,
    rms,
    run,
    wide,
)

HIDDEN, HEADS, HEAD = CONFIG.hidden_size, CONFIG.num_heads, CONFIG.head_dim
YARN = RopeConfig(
    dim=8,
    theta=10000.0,
    kind="yarn",
    interleaved=True,
    factor=4.0,
    original_max_position=64,
    mscale=0.7,
    mscale_all_dim=1.0,
)
V3 = dataclasses.replace(CONFIG, rope=YARN, attention_bias=True)
# Queries are one product, rope is plain; adapters on two of the projections only.
LITE = dataclasses.replace(CONFIG, mla=dataclasses.replace(MLA, q_lora_rank=None))
LITE_TARGETS = frozenset(f"model.layers.0.self_attn.{name}" for name in ("q_proj", "kv_b_proj"))


def make_mla(config, **slot_options):
    return randomise(LatentAttention("model.layers.0.self_attn", config, build(**slot_options)))


def rotate(x, positions, rope):
    """Pairs as complex numbers; x [tokens, ..., dim]."""
    turn = np.exp(1j * positions[:, None] * inverse_frequencies(rope).astype(np.float64))
    turn = attention_factor(rope) * turn.reshape(len(positions), *[1] * (x.ndim - 2), -1)
    half = x.shape[-1] // 2
    if rope.interleaved:
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    else:
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def kv_b_slots(module):
    """kv_b's slots with B in the checkpoint's order instead of by head."""
    slots = module.slots
    if slots is None:
        return None
    by_head = np.concatenate([wide(slots.b_key), wide(slots.b_value)], axis=-1).swapaxes(1, 2)
    whole = by_head.reshape(len(by_head), 1, by_head.shape[1], -1)
    return SimpleNamespace(a=slots.a, b=whole, scaling=slots.scaling)


def kv_b_weight(module):
    """The checkpoint's kv_b from the two absorbed weights: per head, key rows then value rows."""
    keys, values = wide(module.k_up).transpose(0, 2, 1), wide(module.v_up)
    return np.concatenate([keys, values], axis=1).reshape(-1, MLA.kv_lora_rank)


def textbook(mla, x, positions, slot):
    """One sequence of one adapter, every head's keys and values expanded; float64."""
    config, x = mla.config, np.asarray(x, np.float64)

    def fused(i, start, stop):
        weight = wide(mla.in_proj.weight)[start:stop]
        y = x @ merged(weight, mla.in_proj.slots[i], slot).T
        bias = mla.in_proj.bias
        return y if bias is None else y + wide(bias)[start:stop]

    first = mla.in_proj.widths[0]
    q, kv_a = fused(0, 0, first), fused(1, first, None)
    if config.mla.q_lora_rank is not None:
        q_a = rms(q, wide(mla.q_a_layernorm.weight), 1e-6)
        q = q_a @ merged(mla.q_b_proj.weight[...], mla.q_b_proj.slots, slot).T
    q = q.reshape(len(x), HEADS, HEAD)
    latent = rms(kv_a[:, : MLA.kv_lora_rank], wide(mla.kv_a_layernorm.weight), 1e-6)
    k_rope = rotate(kv_a[:, MLA.kv_lora_rank :], positions, config.rope)
    kv_b = merged(kv_b_weight(mla.kv_b_proj), kv_b_slots(mla.kv_b_proj), slot)
    kv = (latent @ kv_b.T).reshape(len(x), HEADS, -1)
    k_nope, v = np.split(kv, [MLA.qk_nope_head_dim], axis=-1)
    q_nope, q_rope = np.split(q, [MLA.qk_nope_head_dim], axis=-1)
    q_rope = rotate(q_rope, positions, config.rope)
    scores = np.einsum("thd,shd->hts", q_nope, k_nope) + np.einsum("thd,sd->hts", q_rope, k_rope)
    mscale = 0.1 * np.log(config.rope.factor) + 1 if config.rope.kind == "yarn" else 1.0
    scores = scores * HEAD**-0.5 * mscale**2
    scores = np.where(positions[:, None] >= positions, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hts,shd->thd", weights, v).reshape(len(x), -1)
    y = out @ merged(mla.o_proj.weight[...], mla.o_proj.slots, slot).T
    return y + wide(mla.o_proj.bias) if config.attention_bias else y


def empty_cache(request, positions, page_size=4, requests=4, fill=np.nan):
    """Shuffled pages full of NaN."""
    pages = 5 * requests
    tables = np.random.default_rng(0).permutation(pages).reshape(requests, 5).astype(np.int32)
    shapes = LatentAttention.cache_shapes(CONFIG)
    first, second = (np.full((pages, page_size, *s), fill, np.float32) for s in shapes)
    view = PageView(np.asarray(request, np.int32), np.asarray(positions, np.int32), tables)
    return LayerCache(first, second, view)


REQUEST = np.array([0] * 17 + [1] * 9 + [-1] + [2] * 3 + [3] * 11)
POSITIONS = np.concatenate([np.arange(n) for n in (17, 9, 1, 3, 11)]).astype(np.int32)
SLOT_OF_REQUEST = np.array([1, -1, 0, 2, -1])  # the last is the padding token's


def batch(seed=2):
    """Four requests of four adapters, base-only among them, and a padding token."""
    slots = SLOT_OF_REQUEST[REQUEST].astype(np.int32)
    x = normal(len(REQUEST), HIDDEN, seed=seed)
    return x, POSITIONS, slots, empty_cache(REQUEST, POSITIONS)


@pytest.mark.parametrize("config, targets", [(V3, None), (LITE, LITE_TARGETS)], ids=["v3", "lite"])
def test_equals_the_textbook_form(config, targets):
    mla = make_mla(config, targets=targets)
    assert (mla.o_proj.slots is None) == (targets is not None)
    x, *rest = batch()
    found, cache = run(mla, x, *rest)
    assert np.isfinite(found).all()
    for request in range(4):
        rows = REQUEST == request
        expected = textbook(mla, x[rows], POSITIONS[rows], SLOT_OF_REQUEST[request])
        np.testing.assert_allclose(np.asarray(found)[rows], expected, rtol=2e-4, atol=2e-4)
    written = np.isfinite(cache.first).all(-1).sum()
    assert written == np.isfinite(cache.second).all(-1).sum() == (REQUEST >= 0).sum()


def test_kv_b_comes_back_from_its_two_halves():
    """What is loaded is stored again, though each half is a parameter of its own."""
    kv_b = normal(HEADS * 32, MLA.kv_lora_rank)
    keys, values = KeyRows(MLA), ValueRows(MLA)
    by_head = kv_b.reshape(HEADS, 32, MLA.kv_lora_rank)
    assert np.array_equal(keys.load(kv_b), by_head[:, :16].swapaxes(1, 2))
    assert np.array_equal(values.load(kv_b), by_head[:, 16:])
    assert np.array_equal(keys.store(keys.load(kv_b))[0], by_head[:, :16])
    assert np.array_equal(values.store(values.load(kv_b))[0], by_head[:, 16:])


def test_the_work_does_not_grow_with_the_number_of_slots():
    """Adapters are read where they lie: no copy of all slots is made."""

    def temporary_bytes(slots: int) -> int:
        with_slots = nnx.eval_shape(lambda: AbsorbedKvB("kv_b_proj", V3, many_slots(slots)))
        graph, state = nnx.split(with_slots)
        tokens, pages = 8, (5, 4)
        shapes = (
            (tokens, HEADS, MLA.qk_nope_head_dim),
            (tokens, HEADS, MLA.qk_rope_head_dim),
            (*pages, MLA.kv_lora_rank),
            (*pages, MLA.qk_rope_head_dim),
        )
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        of_token = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        view = PageView(of_token, of_token, jax.ShapeDtypeStruct((2, 2), jnp.int32))

        def attend(state, arrays, view, token_slots):
            kv_b = nnx.merge(graph, state).by_head()
            return latent_attention(*arrays, view, kv_b, token_slots, scale=1.0)

        compiled = jax.jit(attend).lower(state, arrays, view, of_token).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporary_bytes(2), temporary_bytes(200)
    assert many <= 1.5 * few


def many_slots(slots: int) -> Build:
    return Build(nnx.Rngs(0), "float32", SlotConfig(slots=slots, rank=3, dtype="float32"))


def test_decoding_gives_the_bits_of_prefill():
    """The requests of a batch one token at a time."""
    mla = make_mla(V3)
    x, positions, slots, cache = batch()
    whole = np.asarray(run(mla, x, positions, slots, cache)[0])
    for t in np.flatnonzero(REQUEST >= 0):
        one = slice(t, t + 1)
        view = PageView(REQUEST[one], positions[one], cache.view.page_tables)
        cache = cache._replace(view=view)
        y, cache = run(mla, x[one], positions[one], slots[one], cache)
        assert np.array_equal(y, whole[one]), t


def test_a_poisoned_adapter_stays_with_its_request():
    mla, args = make_mla(V3), batch()
    clean = np.asarray(run(mla, *args)[0])
    poisoned = nnx.state(mla, LoraParam)
    for _, variable in nnx.to_flat_state(poisoned):
        variable[...] = variable[...].at[0].set(jnp.nan)
    nnx.update(mla, poisoned)
    found = np.asarray(run(mla, *args)[0])
    others = REQUEST != 2  # the request of slot 0
    assert np.array_equal(found[others], clean[others])
    assert np.isnan(found[~others]).all()


def test_one_sequence_alone():
    """`mla(x, positions, adapter_slots, cache)` with the cache that the library makes."""
    mla = make_mla(LITE, targets=frozenset())
    cache = single_sequence_cache(mla.cache_shapes(mla.config), 19, "float32", page_size=8)
    assert cache.first.shape == (3, 8, 32) and cache.second.shape == (3, 8, 8)
    x, positions = normal(19, HIDDEN), np.arange(19, dtype=np.int32)
    y, updated = run(mla, x, positions, np.full(19, 2, np.int32), cache)
    expected = textbook(mla, x, positions, 2)
    np.testing.assert_allclose(y, expected, rtol=2e-4, atol=2e-4)
    assert np.asarray(updated.first).reshape(24, 32)[:19].any(-1).all()


@pytest.mark.slow
def test_in_a_notebook():
    """The same without compilation."""
    mla = make_mla(LITE)
    cache = single_sequence_cache(mla.cache_shapes(mla.config), 19, "float32")
    x, positions = jnp.asarray(normal(19, HIDDEN)), jnp.arange(19)
    y, _ = mla(x, positions, jnp.full(19, 2), cache)
    np.testing.assert_allclose(y, textbook(mla, x, np.arange(19), 2), rtol=2e-4, atol=2e-4)
