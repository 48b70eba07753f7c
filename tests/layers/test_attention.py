"""gpt-oss's attention: against its formula, and with the cache that a TPU has."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_moe_jax.layers import lanes
from lora_moe_jax.layers.attention import Attention
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.cache import single_sequence_cache
from lora_moe_jax.layers.rope import cos_sin
from tests.layers.modules import CONFIG, ROPE

TOKENS, HEADS, KV_HEADS, WIDTH, WINDOW = 23, 6, 2, 16, 5
GPT_OSS = dataclasses.replace(
    CONFIG,
    family="gpt_oss",
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=WIDTH,
    rope=dataclasses.replace(ROPE, dim=WIDTH),
    attention_bias=True,
    qk_norm=False,
    sinks=True,
    mla=None,
)


def make(window: int | None) -> Attention:
    """With random biases and sinks."""
    attention = Attention("a", GPT_OSS, Build(nnx.Rngs(0), "float32"), window)
    rng = np.random.default_rng(1)
    for path, variable in nnx.to_flat_state(nnx.state(attention)):
        if path[-1] in ("bias", "sinks"):
            variable[...] = jnp.asarray(rng.standard_normal(variable.shape), jnp.float32)
    return attention


def run(attention: Attention, x):
    cache = single_sequence_cache(attention.cache_shapes(GPT_OSS), TOKENS, "float32", page_size=4)
    positions, slots = jnp.arange(TOKENS), jnp.full(TOKENS, -1)
    y, cache = jax.jit(lambda *arguments: attention(*arguments))(x, positions, slots, cache)
    return np.asarray(y), cache


def textbook(attention: Attention, x, window: int | None):
    """One query at a time, in float64."""
    x, qkv, out, sinks = (
        np.asarray(array, np.float64)
        for array in (
            x,
            attention.qkv_proj.weight[...],
            attention.o_proj.weight[...],
            attention.sinks[...],
        )
    )
    biases = np.asarray(attention.qkv_proj.bias[...], np.float64)
    heads = (x @ qkv.T + biases).reshape(TOKENS, -1, WIDTH)
    cos, sin = (np.asarray(its)[:, None] for its in cos_sin(jnp.arange(TOKENS), GPT_OSS.rope))
    one, other = np.split(heads, 2, axis=-1)
    rotated = np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
    rows = np.zeros((TOKENS, HEADS, WIDTH))
    for token in range(TOKENS):
        first = 0 if window is None else max(0, token - window + 1)
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            keys = rotated[first : token + 1, HEADS + kv]
            values = heads[first : token + 1, HEADS + KV_HEADS + kv]
            scores = np.append(keys @ rotated[token, head] * WIDTH**-0.5, sinks[head])
            weights = np.exp(scores - scores.max())
            rows[token, head] = (weights / weights.sum())[:-1] @ values
    return rows.reshape(TOKENS, -1) @ out.T + np.asarray(attention.o_proj.bias[...])


@pytest.mark.parametrize("window", [None, WINDOW])
def test_sinks_windows_and_biases(window):
    attention = make(window)
    x = np.random.default_rng(2).standard_normal((TOKENS, CONFIG.hidden_size)).astype(np.float32)
    y, _ = run(attention, x)
    np.testing.assert_allclose(y, textbook(attention, x, window), rtol=2e-4, atol=2e-4)


def test_a_cache_of_whole_lanes_changes_nothing(monkeypatch):
    """On a TPU a head's halves have zeros after them."""
    attention = make(WINDOW)
    x = np.random.default_rng(2).standard_normal((TOKENS, CONFIG.hidden_size)).astype(np.float32)
    y, narrow = run(attention, x)
    monkeypatch.setattr(lanes, "platform_implementation", lambda: "mosaic_tpu")
    found, wide = run(attention, x)
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)
    for its, other in ((wide.first, narrow.first), (wide.second, narrow.second)):
        halves = its.reshape(*its.shape[:-1], 2, 64)
        assert its.shape[-1] == 128 and not np.any(halves[..., WIDTH // 2 :])
        np.testing.assert_array_equal(halves[..., : WIDTH // 2].reshape(other.shape), other)
    assert Attention.cache_shapes(dataclasses.replace(GPT_OSS, qk_norm=True))[0][-1] == WIDTH
