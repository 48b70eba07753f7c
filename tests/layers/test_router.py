"""The router against a NumPy model of each family's choice."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax.layers.router import Router, keep_best_groups
from tests.layers.modules import MOE, build, merged, normal, randomise, run, slots_of, wide

HIDDEN, TOKENS = 32, 60
SIGMOID = dataclasses.replace(
    MOE,
    scoring="sigmoid",
    correction_bias=True,
    n_group=4,
    topk_group=2,
    group_score="top2_sum",
    routed_scaling_factor=2.5,
)
CONFIGS = {
    "qwen3": dataclasses.replace(MOE, router_float32=False),
    "gpt-oss": dataclasses.replace(MOE, router_float32=False, bias=True),
    "qwen3 without normalisation": dataclasses.replace(MOE, norm_topk_prob=False),
    "deepseek v2, greedy": dataclasses.replace(
        MOE, norm_topk_prob=False, routed_scaling_factor=16.0
    ),
    "deepseek v2, groups": dataclasses.replace(
        MOE, n_group=4, topk_group=1, group_score="max", norm_topk_prob=False
    ),
    "deepseek v3": SIGMOID,
}


def make_router(config, dtype="float32"):
    router = randomise(Router("model.layers.0.mlp.gate", HIDDEN, config, build(dtype)))
    if config.correction_bias:
        # Far below zero: a ruled-out expert must not win because it counts as 0.
        bias = router.correction_bias[...]
        router.correction_bias[...] = bias - 3
    return router


def route(router, x, slots):
    """Experts and weights by the definition, one token at a time in float64."""
    config, experts, weights = router.config, [], []
    for token, slot in zip(np.asarray(x, np.float64), slots, strict=True):
        logits = merged(router.proj.weight[...], router.proj.slots, slot) @ token
        logits += wide(router.proj.bias) if config.bias else 0
        if config.scoring == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        else:
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        choice = scores + (wide(router.correction_bias) if config.correction_bias else 0)
        if config.group_score != "none":
            groups = choice.reshape(config.n_group, -1)
            best = np.sort(groups)[:, ::-1]
            group_scores = best[:, 0] if config.group_score == "max" else best[:, :2].sum(1)
            kept = np.argsort(-group_scores, kind="stable")[: config.topk_group]
            ruled_out = 0 if config.group_score == "max" else -np.inf
            choice = np.where(np.isin(np.arange(config.n_group), kept)[:, None], groups, ruled_out)
        chosen = np.argsort(-choice.reshape(-1), kind="stable")[: config.top_k]
        weight = scores[chosen]
        if config.norm_topk_prob:
            weight = weight / weight.sum()
        experts.append(chosen)
        weights.append(weight * config.routed_scaling_factor)
    return np.array(experts), np.array(weights)


@pytest.mark.parametrize("name", CONFIGS)
def test_chooses_as_the_family_does(name):
    router = make_router(CONFIGS[name])
    x, slots = normal(TOKENS, HIDDEN), slots_of(TOKENS)
    experts, weights = run(router, x, slots)
    expected_experts, expected_weights = route(router, x, slots)
    assert np.array_equal(experts, expected_experts)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-4)
    assert not np.array_equal(experts, run(router, x, np.full_like(slots, -1))[0])


@pytest.mark.parametrize("name, dtype", [("qwen3", jnp.bfloat16), ("deepseek v3", jnp.float32)])
def test_the_dtype_of_the_weights(name, dtype):
    """Qwen3 routes in the activations' dtype, DeepSeek in float32."""
    router = make_router(CONFIGS[name], "bfloat16")
    x = normal(TOKENS, HIDDEN, dtype="bfloat16")
    experts, weights = run(router, x, slots_of(TOKENS))
    assert weights.dtype == dtype
    if dtype == jnp.float32:
        expected_experts, expected_weights = route(router, x, slots_of(TOKENS))
        assert np.array_equal(experts, expected_experts)
        np.testing.assert_allclose(weights, expected_weights, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "deepseek v2, groups", "deepseek v3"])
def test_ties_go_to_the_lower_expert(name):
    """All experts alike: groups tie too."""
    router = make_router(CONFIGS[name])
    router.proj.weight[...] = jnp.zeros_like(router.proj.weight[...])
    if router.correction_bias is not None:
        router.correction_bias[...] = jnp.full(8, -0.5)
    experts, weights = run(router, normal(5, HIDDEN), np.full(5, -1, np.int32))
    assert np.array_equal(experts, np.tile([0, 1, 2], (5, 1)))
    assert (np.asarray(weights) == np.asarray(weights)[0, 0]).all()


def test_groups_that_are_ruled_out():
    choice = np.array([[-1, -9, -3, -3, -2, -3, -8, -8]], np.float32)
    best_sum = keep_best_groups(choice, SIGMOID)  # sums -10, -6, -5, -16
    lost = -np.inf
    assert np.array_equal(best_sum, [[lost, lost, -3, -3, -2, -3, lost, lost]])
    best_one = keep_best_groups(choice, dataclasses.replace(SIGMOID, group_score="max"))
    assert np.array_equal(best_one, [[-1, -9, 0, 0, -2, -3, 0, 0]])
    none = keep_best_groups(choice, dataclasses.replace(SIGMOID, group_score="none"))
    assert np.array_equal(none, choice)
