"""The mixture of experts against a loop over tokens with merged weights."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax.layers.experts import MoeMlp
from lora_moe_jax.models import gpt_oss
from tests.layers.modules import (
    CONFIG,
    MOE,
    build,
    merged,
    normal,
    randomise,
    run,
    silu,
    slots_of,
    wide,
)

TOKENS, HIDDEN = 26, CONFIG.hidden_size


def make_moe(moe_config=MOE, **options):
    config = dataclasses.replace(CONFIG, moe=moe_config)
    return randomise(MoeMlp("model.layers.0.mlp", config, build(**options)))


def gated(x, gate, up, down):
    return down @ (silu(gate @ x) * (up @ x))


def expert(moe, e, slot):
    """Merged gate, up and down of one expert."""
    experts = moe.experts
    gate, up = wide(experts.gate_up_proj)[e]
    return (
        merged(gate, experts.gate_slots, slot, e),
        merged(up, experts.up_slots, slot, e),
        merged(wide(experts.down_proj)[e], experts.down_slots, slot, e),
    )


def shared_expert(moe, slot):
    mlp = moe.shared_experts
    gate, up = wide(mlp.gate_up)
    return (
        merged(gate, mlp.gate_slots, slot),
        merged(up, mlp.up_slots, slot),
        merged(mlp.down_proj.weight[...], mlp.down_proj.slots, slot),
    )


def expected(moe, x, slots, valid=None):
    out = np.zeros(x.shape)
    config = moe.gate.config
    for t, (row, slot) in enumerate(zip(x.astype(np.float64), slots, strict=True)):
        scores = np.exp(merged(moe.gate.proj.weight[...], moe.gate.proj.slots, slot) @ row)
        scores /= scores.sum()
        chosen = np.argsort(-scores)[: config.top_k]
        if valid is None or valid[t]:
            for e in chosen:
                weight = scores[e] / scores[chosen].sum()
                out[t] += weight * gated(row, *expert(moe, e, slot))
        if moe.shared_experts is not None:
            out[t] += gated(row, *shared_expert(moe, slot))
    return out


def test_biases_and_the_gate_of_gpt_oss():
    """Of the router, of gate and up before they are cut, and of down, weighted."""
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, bias=True, shared_size=0))
    moe = randomise(MoeMlp("model.layers.0.mlp", config, build(), gpt_oss.GATE))
    experts = moe.experts
    for seed, bias in enumerate((experts.gate_up_bias, experts.down_bias)):
        bias[...] = 4 * jnp.asarray(normal(*bias.shape, seed=seed))
    x, slots, wanted, cut = 3 * normal(TOKENS, HIDDEN), slots_of(TOKENS), [], 0
    for row, slot in zip(x.astype(np.float64), slots, strict=True):
        logits = merged(moe.gate.proj.weight[...], moe.gate.proj.slots, slot) @ row
        logits += wide(moe.gate.proj.bias)
        chosen = np.argsort(-logits)[: config.moe.top_k]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        total = np.zeros(HIDDEN)
        for e, weight in zip(chosen, weights, strict=True):
            gate, up, down = expert(moe, e, slot)
            of_gate, of_up = wide(experts.gate_up_bias)[e]
            gate, up = gate @ row + of_gate, up @ row + of_up
            cut += (gate > 7).sum() + (abs(up) > 7).sum()
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            total += weight * (down @ hidden + wide(experts.down_bias)[e])
        wanted.append(total)
    assert cut > 20
    np.testing.assert_allclose(run(moe, x, slots), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared_outer, shared_size", [(False, 48), (True, 0)])
def test_equals_a_loop_over_tokens(shared_outer, shared_size):
    """With an adapter side for each expert and with one for all; with shared experts or none."""
    moe = make_moe(dataclasses.replace(MOE, shared_size=shared_size), shared_outer=shared_outer)
    sides = [moe.experts.gate_slots.a, moe.experts.up_slots.a, moe.experts.down_slots.b]
    assert {side.shape[1] for side in sides} == {1 if shared_outer else 8}
    assert (moe.shared_experts is None) == (shared_size == 0)
    x, slots = normal(TOKENS, HIDDEN), slots_of(TOKENS)
    np.testing.assert_allclose(run(moe, x, slots), expected(moe, x, slots), rtol=1e-4, atol=1e-4)


def test_padding_tokens_reach_no_expert_and_no_other_token():
    moe = make_moe()
    x, slots = normal(TOKENS, HIDDEN), slots_of(TOKENS)
    valid = np.arange(TOKENS) % 3 != 1
    clean = np.asarray(run(moe, x, slots, np.ones(TOKENS, bool)))
    found = np.asarray(run(moe, x, slots, valid))
    assert np.array_equal(found[valid], clean[valid])
    np.testing.assert_allclose(found, expected(moe, x, slots, valid), rtol=1e-4, atol=1e-4)
    x[~valid] = np.nan
    assert np.array_equal(np.asarray(run(moe, x, slots, valid))[valid], clean[valid])


def test_a_poisoned_slot_reaches_no_other_token():
    """NaN in the router and in every expert of slot 0, which base-only rows read and drop."""
    moe = make_moe()
    x, slots = normal(TOKENS, HIDDEN), slots_of(TOKENS)
    clean = np.asarray(run(moe, x, slots))
    experts = moe.experts
    for bank in (moe.gate.proj.slots, experts.gate_slots, experts.up_slots, experts.down_slots):
        for variable in (bank.a, bank.b, bank.scaling):
            variable[...] = variable[...].at[0].set(jnp.nan)
    found = np.asarray(run(moe, x, slots))
    assert np.array_equal(found[slots != 0], clean[slots != 0])
    assert np.isnan(found[slots == 0]).all()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_token_gets_the_same_bits_alone_and_among_others(dtype):
    """Other tokens of the batch, their experts and their adapters change nothing."""
    moe = make_moe(dtype=dtype)
    x, slots = normal(TOKENS, HIDDEN, dtype=dtype), slots_of(TOKENS)
    everything = np.asarray(run(moe, x, slots))
    for token in range(TOKENS):
        one = slice(token, token + 1)
        assert np.array_equal(run(moe, x[one], slots[one]), everything[one]), token
    changed = np.where(np.arange(TOKENS) % 2, slots, -1).astype(np.int32)
    assert np.array_equal(np.asarray(run(moe, x, changed))[1::2], everything[1::2])


@pytest.mark.slow
def test_in_a_notebook():
    """Not compiled, no padding mask: `moe(x, adapter_slots)`."""
    moe = make_moe()
    x, slots = jnp.asarray(normal(TOKENS, HIDDEN)), jnp.asarray(slots_of(TOKENS))
    np.testing.assert_allclose(moe(x, slots), run(moe, x, slots), rtol=1e-5, atol=1e-5)
