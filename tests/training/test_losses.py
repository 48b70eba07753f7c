"""Each loss and its gradient by logprobs against the formula written out in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax import RequestError
from lora_moe_jax.training import Loss, grpo_advantages
from lora_moe_jax.training.datum import Row
from lora_moe_jax.training.loss_value import value_and_gradient
from lora_moe_jax.training.losses import LOSSES, loss_of

LENGTHS = [5, 12, 2, 30]


def rows_and_logprobs(seed: int = 0, count: int = 4) -> tuple[list[Row], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    rows, logprobs = [], []
    for i, length in enumerate(LENGTHS[:count]):
        logprobs.append(-rng.random(length - 1, np.float32) * 4)
        inputs = {
            "old_logprobs": (logprobs[-1] + 0.4 * rng.standard_normal(length - 1)).astype("f4"),
            "ref_logprobs": (logprobs[-1] + 0.4 * rng.standard_normal(length - 1)).astype("f4"),
            "advantages": np.full(length - 1, rng.standard_normal(), np.float32),
        }
        weights = rng.random(length - 1, np.float32)
        rows.append(Row(i, "a", np.zeros(length, np.int32), weights, inputs))
    return rows, logprobs


def by_hand(name: str, rows: list[Row], logprobs: list[np.ndarray]) -> float:
    total, ratios = 0.0, []
    for row, logprob in zip(rows, np.array(logprobs, object), strict=True):
        logprob = np.float64(logprob.astype(float))
        w, advantage = np.float64(row.weights), np.float64(row.inputs["advantages"])
        ratio = np.exp(logprob - row.inputs["old_logprobs"])
        clipped = np.clip(ratio, 0.8, 1.2)
        ppo = -w * np.minimum(ratio * advantage, clipped * advantage)
        ratios.append(np.sum(w * (logprob - row.inputs["ref_logprobs"])))
        total += {
            "cross_entropy": -np.sum(w * logprob),
            "importance_sampling": -np.sum(w * ratio * advantage),
            "ppo": np.sum(ppo),
            "grpo": np.sum(ppo) / np.sum(w),
            "cispo": -np.sum(w * advantage * np.clip(ratio, 0, 3) * logprob),
            "dpo": 0.0,
        }[name]
    if name == "dpo":
        for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True):
            total += np.log1p(np.exp(-0.1 * (chosen - rejected)))
    return total


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(name):
    loss, options = loss_of(name, {})
    rows, logprobs = rows_and_logprobs()
    value, gradients = value_and_gradient(loss, options, rows, logprobs).read()
    np.testing.assert_allclose(value, by_hand(name, rows, logprobs), rtol=1e-5)
    assert [len(gradient) for gradient in gradients] == [length - 1 for length in LENGTHS]
    if name == "cispo":  # the ratio is a constant in it
        for row, logprob, gradient in zip(rows, logprobs, gradients, strict=True):
            ratio = np.clip(np.exp(logprob - row.inputs["old_logprobs"]), 0, 3)
            expected = -row.weights * row.inputs["advantages"] * ratio
            np.testing.assert_allclose(gradient, expected, rtol=1e-5)
        return
    for i, j in ((0, 1), (1, 7), (3, 20)):
        moved = []
        for sign in (1, -1):
            probe = [logprob.astype(np.float64) for logprob in logprobs]
            probe[i][j] += sign * 1e-5
            moved.append(by_hand(name, rows, probe))
        slope = (moved[0] - moved[1]) / 2e-5
        np.testing.assert_allclose(gradients[i][j], slope, rtol=1e-3, atol=1e-5)


def test_options_and_padding():
    rows, logprobs = rows_and_logprobs()
    wide = value_and_gradient(*loss_of("ppo", {"clip_low": 1, "clip_high": 1e9}), rows, logprobs)
    plain = value_and_gradient(*loss_of("importance_sampling", {}), rows, logprobs)
    np.testing.assert_allclose(wide.read()[0], plain.read()[0], rtol=1e-6)
    # A function that gives padding a loss of its own, and one that adds up by itself.
    ones, gradient = value_and_gradient(
        Loss(lambda logprobs, batch: jnp.exp(logprobs)), {}, rows, logprobs
    ).read()
    np.testing.assert_allclose(ones, sum(np.exp(x).sum() for x in logprobs), rtol=1e-5)
    np.testing.assert_allclose(gradient[1], np.exp(logprobs[1]), rtol=1e-5)
    scalar = Loss(lambda logprobs, batch: jnp.sum(batch.mask * logprobs**2))
    value, _ = value_and_gradient(scalar, {}, rows, logprobs).read()
    np.testing.assert_allclose(value, sum((x**2).sum() for x in logprobs), rtol=1e-5)
    value, gradient = value_and_gradient(Loss(lambda *_: 0.5), {}, rows, logprobs).read()
    assert value == 0.5 and not any(part.any() for part in gradient)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "grpo", "cispo"])
def test_what_has_no_weight_may_have_any_old_logprob(name):
    """Placeholders of prompts, far below what a float32 ratio can be of."""
    rows, logprobs = rows_and_logprobs()
    loss, options = loss_of(name, {})
    for row in rows:
        row.weights[:2] = 0
    expected = value_and_gradient(loss, options, rows, logprobs).read()
    for row in rows:
        row.inputs["old_logprobs"][:2] = -500
    found = value_and_gradient(loss, options, rows, logprobs).read()
    assert np.isfinite(found[0]) and found[0] == expected[0]
    for its, other in zip(found[1], expected[1], strict=True):
        assert np.array_equal(its, other) and not its[:2].any()


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "grpo", "cispo"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_overflows_spoils_nothing(name, advantage):
    """What is clipped, or counts nothing, has no gradient; nor has what is past all bounds."""
    rows, logprobs = rows_and_logprobs()
    for row in rows:
        row.inputs["old_logprobs"][:1] = -200
        row.inputs["advantages"][:1] = advantage
    value, gradients = value_and_gradient(*loss_of(name, {}), rows, logprobs).read()
    assert np.isfinite(value)
    for its in gradients:
        assert np.isfinite(its).all() and (name == "cispo" or not its[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda logprobs, batch: logprobs[0],
        lambda logprobs, batch: logprobs[None],
        lambda logprobs, batch: batch.mask,
        lambda logprobs, batch: (logprobs, logprobs),
        lambda logprobs, batch: None,
    ],
)
def test_wrong_shapes_are_refused(function):
    with pytest.raises(RequestError, match="wrong shape") as caught:
        value_and_gradient(Loss(function), {}, *rows_and_logprobs())
    assert caught.value.key == "loss"


def test_wrong_losses_are_refused():
    for loss, options in (
        ("cross entropy", {}),
        (None, {}),
        ("ppo", {"clip": 0.1}),
        ("ppo", {"clip_low": float("nan")}),
        ("dpo", {"beta": "much"}),
        ("ppo", {"clip_high": 10**400}),
        ("ppo", {"clip_high": 1e300}),
        (Loss(lambda logprobs, batch: logprobs, options={"k": "x"}), {}),
    ):
        with pytest.raises(RequestError):
            loss_of(loss, options)
    assert loss_of("ppo", {"clip_low": np.float32(0.1)})[1]["clip_low"] == np.float32(0.1)
    with pytest.raises(RequestError, match="pairs"):
        value_and_gradient(*loss_of("dpo", {}), *rows_and_logprobs(count=3))


def test_group_advantages():
    found = grpo_advantages([[1, 0, 0, 1], [2, 2, 2, 2]])
    np.testing.assert_allclose(found, [[1, -1, -1, 1], [0, 0, 0, 0]], atol=1e-5)


@pytest.mark.parametrize("rewards", [3.0, ["a"], [[1, 2], [3]], []])
def test_what_is_no_group_of_rewards(rewards):
    with pytest.raises(RequestError, match="groups of rewards"):
        grpo_advantages(rewards)


def test_rewards_are_finite():
    with pytest.raises(RequestError, match="not finite") as error:
        grpo_advantages([[1.0, 2.0], [3.0, float("inf")]])
    assert error.value.found == "inf"


@pytest.mark.parametrize("size", range(2, 17))
def test_equal_rewards_have_no_advantage(size):
    """Whatever their sum is rounded to."""
    values = np.random.default_rng(size).uniform(-1e4, 1e4, (50, 1))
    assert not grpo_advantages(np.repeat(values, size, axis=1)).any()


@pytest.mark.parametrize("scale, offset", [(1.0, 1.7e9), (1e30, 0.0), (1e-3, 1e5)])
def test_advantages_of_large_rewards_are_those_of_their_differences(scale, offset):
    rewards = np.array([[0.0, 1.0, 3.0, 0.0, 2.0]])
    expected = grpo_advantages(rewards)
    np.testing.assert_allclose(grpo_advantages(offset + scale * rewards), expected, rtol=2e-3)
