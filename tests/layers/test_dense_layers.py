"""Linear, fused and gated layers, embedding, head and norm against merged weights in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax.layers.adapter_slots import LoraParam
from lora_moe_jax.layers.embedding import Embedding, OutputHead
from lora_moe_jax.layers.linear import FusedLinear, Linear, Part
from lora_moe_jax.layers.mlp import Mlp
from lora_moe_jax.layers.norm import RmsNorm
from tests.layers.modules import (
    RANK,
    SLOTS,
    build,
    merged,
    normal,
    randomise,
    rms,
    run,
    silu,
    slots_of,
    wide,
)

TOKENS, HIDDEN, WIDTH, VOCAB = 13, 32, 22, 50
CLOSE = dict(rtol=1e-5, atol=1e-5)


def by_token(x, slots, function):
    """function(x[t], slots[t]) for every token, in float64."""
    rows = x.astype(np.float64)
    return np.array([function(row, slot) for row, slot in zip(rows, slots, strict=True)])


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    layer = randomise(Linear("q_proj", HIDDEN, WIDTH, build(), bias=bias))
    x, slots = normal(TOKENS, HIDDEN), slots_of(TOKENS)
    expected = by_token(x, slots, lambda row, s: merged(layer.weight[...], layer.slots, s) @ row)
    if bias:
        expected += wide(layer.bias)
    np.testing.assert_allclose(run(layer, x, slots), expected, **CLOSE)


def test_a_layer_without_slots_ignores_them():
    layer = randomise(Linear("q_proj", HIDDEN, WIDTH, build(targets=frozenset({"k_proj"}))))
    assert layer.slots is None
    x = normal(TOKENS, HIDDEN)
    found = run(layer, x, slots_of(TOKENS))
    np.testing.assert_allclose(found, x @ np.asarray(layer.weight[...]).T, **CLOSE)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_linear(bias):
    """Unequal widths; adapters on the second part alone."""
    parts = Part("q_a_proj", 9, bias=bias), Part("kv_a_proj", 14, bias=bias)
    targets = frozenset({"kv_a_proj"})
    layer = randomise(FusedLinear(parts, HIDDEN, build(targets=targets)))
    assert layer.slots[0] is None
    x, slots = normal(TOKENS, HIDDEN), slots_of(TOKENS)
    weights = np.split(wide(layer.weight), [9])
    expected = [
        x @ weights[0].T,
        by_token(x, slots, lambda row, s: merged(weights[1], layer.slots[1], s) @ row),
    ]
    if bias:
        expected = map(np.add, expected, np.split(wide(layer.bias), [9]))
    found = run(layer, x, slots)
    np.testing.assert_allclose(found, np.concatenate([*expected], axis=1), **CLOSE)


def test_gated_mlp():
    mlp = randomise(Mlp("mlp", HIDDEN, WIDTH, build()))
    x, slots = normal(TOKENS, HIDDEN), slots_of(TOKENS)
    gate, up = wide(mlp.gate_up)

    def one(row, s):
        gated = silu(merged(gate, mlp.gate_slots, s) @ row)
        hidden = gated * (merged(up, mlp.up_slots, s) @ row)
        return merged(mlp.down_proj.weight[...], mlp.down_proj.slots, s) @ hidden

    np.testing.assert_allclose(run(mlp, x, slots), by_token(x, slots, one), **CLOSE)


def test_embedding():
    """PEFT's embedding LoRA: the token's column of A."""
    layer = randomise(Embedding("model.embed_tokens", VOCAB, HIDDEN, build()))
    tokens, slots = np.array([0, 1, 49, 7, 7, 7, 7, 30, 2], np.int32), slots_of(9)
    expected = [
        merged(wide(layer.weight).T, layer.slots, s)[:, token]
        for token, s in zip(tokens, slots, strict=True)
    ]
    np.testing.assert_allclose(run(layer, tokens, slots), np.array(expected), **CLOSE)
    base = slots < 0
    assert np.array_equal(
        np.asarray(run(layer, tokens, slots))[base], np.asarray(layer.weight[...])[tokens[base]]
    )


def test_a_poisoned_slot_does_not_reach_other_tokens_embeddings():
    layer = randomise(Embedding("model.embed_tokens", VOCAB, HIDDEN, build()))
    tokens, slots = np.arange(12, dtype=np.int32), slots_of(12)
    clean = np.asarray(run(layer, tokens, slots))
    for variable in (layer.slots.a, layer.slots.b, layer.slots.scaling):
        variable[...] = variable[...].at[0].set(jnp.nan)
    found = np.asarray(run(layer, tokens, slots))
    assert np.array_equal(found[slots != 0], clean[slots != 0])
    assert np.isnan(found[slots == 0]).all()


@pytest.mark.parametrize("tied", [False, True])
def test_output_head(tied):
    embedding = randomise(Embedding("model.embed_tokens", VOCAB, HIDDEN, build()))
    head = randomise(OutputHead("lm_head", HIDDEN, VOCAB, build(), tied=tied), seed=3)
    weight = (embedding if tied else head).weight[...]
    assert (head.weight is None) == tied
    x, slots = normal(TOKENS, HIDDEN), slots_of(TOKENS)
    expected = by_token(x, slots, lambda row, s: merged(weight, head.slots, s) @ row)
    found = jax.jit(lambda x, slots: head(x, slots, embedding))(x, slots)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_logits_are_float32_in_bfloat16_models():
    embedding = Embedding("model.embed_tokens", VOCAB, HIDDEN, build("bfloat16"))
    head = OutputHead("lm_head", HIDDEN, VOCAB, build("bfloat16"), tied=True)
    x = normal(3, HIDDEN, dtype="bfloat16")
    assert head(x, slots_of(3), embedding).dtype == jnp.float32


def test_rms_norm():
    norm = randomise(RmsNorm("norm", HIDDEN, 1e-2, build()))
    x = 0.1 * normal(TOKENS, 3, HIDDEN)  # eps counts
    found = run(norm, x)
    np.testing.assert_allclose(found, rms(x.astype(np.float64), wide(norm.weight), 1e-2), **CLOSE)


def test_rms_norm_rounds_before_the_weight():
    """As the models' own code: normalised in float32, cast, then multiplied in bfloat16."""
    norm = randomise(RmsNorm("norm", HIDDEN, 1e-5, build("bfloat16")))
    x = normal(TOKENS, HIDDEN, dtype="bfloat16")
    weight = np.asarray(norm.weight[...])
    normed = rms(x.astype(np.float64), 1.0, 1e-5).astype(np.float32).astype(x.dtype)
    found = np.asarray(run(norm, x))
    assert found.dtype == x.dtype
    assert np.array_equal(found, normed * weight)


def test_slots_start_at_zero():
    """An empty slot is the base model."""
    layer = Linear("q_proj", HIDDEN, WIDTH, build())
    assert isinstance(layer.slots.a, LoraParam)
    assert layer.slots.a.shape == (SLOTS, 1, RANK, HIDDEN)
    assert layer.slots.b.shape == (SLOTS, 1, RANK, WIDTH)
    assert layer.slots.scaling.shape == (SLOTS, 1) and layer.slots.scaling.dtype == jnp.float32
    x = normal(TOKENS, HIDDEN)
    assert np.array_equal(run(layer, x, slots_of(TOKENS)), run(layer, x, np.full(TOKENS, -1)))
