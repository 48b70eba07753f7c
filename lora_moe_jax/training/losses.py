"""Losses: functions of logprobs and what comes with them, evaluated for one adapter at a time.

A loss sees the sequences of one adapter as arrays [D, L]: D sequences (padded to a power of two),
entry [d, i] for the token after the i-th of sequence d. It returns a loss for each token, [D, L],
or one number. Losses are sums: nothing is divided by how many tokens there are, unless a loss says
so, and never by another adapter's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lora_moe_jax.errors import RequestError
from lora_moe_jax.training.arguments import checked_number

# Ratios of policies up to e²⁰ have a gradient, as in other trainers; above they are that constant.
LARGEST_LOG_RATIO = 20.0


class LossBatch(NamedTuple):
    """What a loss gets beside the logprobs; padding is zero.

    Attributes:
      weights: float32 [D, L], of `Datum.weights`.
      mask: bool [D, L], False for padding.
      inputs: float32 [D, L] each, of `Datum.inputs`: those that the `Loss` says it needs. A
        function alone has none.
      options: the numbers that `forward_backward` was given for the loss.
    """

    weights: jax.Array
    mask: jax.Array
    inputs: dict[str, jax.Array]
    options: dict[str, float]


LossFunction = Callable[[jax.Array, LossBatch], jax.Array]


@dataclass(frozen=True)
class Loss:
    """A loss and what it asks for.

    Attributes:
      function: `(logprobs float32 [D, L], LossBatch) -> [D, L] or one number`.
      needs: names of `Datum.inputs`.
      options: its options and their default values.
      by_sequence: whether each sequence's loss is its own. If not, the logprobs of all of an
        adapter's sequences have to be there before the first gradient.
      pairs: whether an adapter's sequences come in pairs.
    """

    function: LossFunction
    needs: tuple[str, ...] = ()
    options: dict[str, float] = field(default_factory=dict, hash=False)
    by_sequence: bool = True
    pairs: bool = False


def cross_entropy(logprobs: jax.Array, batch: LossBatch) -> jax.Array:
    """-weight · logprob."""
    return -batch.weights * logprobs


def importance_sampling(logprobs: jax.Array, batch: LossBatch) -> jax.Array:
    """-weight · advantage · ratio to the policy that sampled."""
    return -batch.weights * batch.inputs["advantages"] * _ratio(logprobs, batch)


def ppo(logprobs: jax.Array, batch: LossBatch) -> jax.Array:
    """-weight · min(ratio · advantage, ratio within [1 - clip_low, 1 + clip_high] · advantage)."""
    ratio, advantages, options = _ratio(logprobs, batch), batch.inputs["advantages"], batch.options
    clipped = jnp.clip(ratio, 1 - options["clip_low"], 1 + options["clip_high"])
    return -batch.weights * jnp.minimum(ratio * advantages, clipped * advantages)


def grpo(logprobs: jax.Array, batch: LossBatch) -> jax.Array:
    """PPO's loss as a mean over each sequence's weights; see `grpo_advantages`."""
    total = batch.weights.sum(axis=1, keepdims=True)
    return ppo(logprobs, batch) / jnp.where(total == 0, 1, total)


def cispo(logprobs: jax.Array, batch: LossBatch) -> jax.Array:
    """-weight · advantage · logprob times the clipped ratio as a constant: no token is left out."""
    options = batch.options
    clipped = jnp.clip(_ratio(logprobs, batch), 1 - options["clip_low"], 1 + options["clip_high"])
    return -batch.weights * batch.inputs["advantages"] * jax.lax.stop_gradient(clipped) * logprobs


def dpo(logprobs: jax.Array, batch: LossBatch) -> jax.Array:
    """Of each pair, sequence 2i chosen and 2i + 1 rejected: -log sigmoid(beta · difference).

    The difference is that of the weighted log ratios to the reference.
    """
    ratios = jnp.sum(batch.weights * (logprobs - batch.inputs["ref_logprobs"]), axis=1)
    losses = -jax.nn.log_sigmoid(batch.options["beta"] * (ratios[0::2] - ratios[1::2]))
    return jnp.sum(jnp.where(batch.mask[0::2, 0], losses, 0))


def _ratio(logprobs: jax.Array, batch: LossBatch) -> jax.Array:
    # Nothing must be infinite, neither what counts nothing nor what is clipped: 0 · inf is NaN.
    counts = batch.weights != 0
    logarithm = jnp.where(counts, logprobs - batch.inputs["old_logprobs"], 0)
    return jnp.exp(jnp.minimum(logarithm, LARGEST_LOG_RATIO))


_POLICY = ("old_logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(cross_entropy),
    "importance_sampling": Loss(importance_sampling, _POLICY),
    "ppo": Loss(ppo, _POLICY, {"clip_low": 0.2, "clip_high": 0.2}),
    "grpo": Loss(grpo, _POLICY, {"clip_low": 0.2, "clip_high": 0.2}),
    "cispo": Loss(cispo, _POLICY, {"clip_low": 1.0, "clip_high": 2.0}),
    "dpo": Loss(dpo, ("ref_logprobs",), {"beta": 0.1}, by_sequence=False, pairs=True),
}


def grpo_advantages(rewards: Sequence[float], epsilon: float = 1e-6) -> np.ndarray:
    """(reward - mean) / (standard deviation + epsilon) within groups.

    Args:
      rewards: [..., group], the last axis one prompt's completions.

    Returns:
      float32 [..., group]; zeros for equal rewards.

    Raises:
      RequestError: these are no groups of finite numbers.
    """
    try:
        rewards = np.asarray(rewards, np.float64)
    except (TypeError, ValueError):
        rewards = None
    if rewards is not None and not np.isfinite(rewards).all():
        raise RequestError(
            "a reward is not finite",
            key="rewards",
            expected="finite numbers [..., group]",
            found=f"{rewards[~np.isfinite(rewards)][0]}",
        )
    if rewards is None or rewards.ndim == 0 or rewards.size == 0:
        raise RequestError(
            "these are no groups of rewards",
            key="rewards",
            expected="numbers [..., group]",
            found="no numbers" if rewards is None else f"shape {list(rewards.shape)}",
        )
    # From the first: equal rewards have no advantage, where their mean may be off by a last bit.
    rewards = rewards - rewards[..., :1]
    centred = rewards - rewards.mean(axis=-1, keepdims=True)
    return np.float32(centred / (rewards.std(axis=-1, keepdims=True) + epsilon))


def loss_of(loss: str | Loss | LossFunction, options: dict[str, float]) -> tuple[Loss, dict]:
    """The loss that is meant, and all its options as float32.

    Raises:
      RequestError: there is no such loss, or it has no such option.
    """
    if isinstance(loss, str) and loss in LOSSES:
        loss = LOSSES[loss]
    elif callable(loss) and isinstance(loss, Hashable):
        loss = Loss(loss, options=dict(options), by_sequence=False)
    if not isinstance(loss, Loss):
        raise RequestError(
            "there is no such loss",
            key="loss",
            expected=f"one of {list(LOSSES)}, a Loss, or a hashable function of (logprobs, batch)",
            found=repr(loss)[:200],
        )
    for name, value in options.items():
        if name not in loss.options:
            raise RequestError(
                "the loss has no such option",
                key=name,
                expected=f"among {list(loss.options)}",
                found=repr(value)[:200],
            )
    merged = loss.options | options
    return loss, {name: np.float32(checked_number(name, its)) for name, its in merged.items()}
