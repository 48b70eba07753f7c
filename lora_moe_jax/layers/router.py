"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from lora_moe_jax.config.model import MoeConfig
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.linear import Linear
from pallas_kernels import row_sum


class Router(nnx.Module):
    """Softmax or sigmoid scores, optional expert groups and correction bias, top-k.

    Ties go to the expert with the lower number. Weights are float32 for DeepSeek, in the
    activations' dtype for Qwen3, as in the models' own code.
    """

    def __init__(self, name: str, hidden: int, config: MoeConfig, build: Build):
        self.config = config
        self.proj = Linear(name, hidden, config.num_experts, build, kind="router")
        self.correction_bias = (
            build.bias(config.num_experts, None, f"{name}.e_score_correction_bias", "float32")
            if config.correction_bias
            else None
        )

    def __call__(
        self, x: Float[Array, "tokens hidden"], token_slots: Int[Array, " tokens"]
    ) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
        config = self.config
        # Products of bfloat16 are exact in float32, where they are summed: x stays as it is.
        logits = self.proj(x, token_slots, jnp.float32 if config.router_float32 else None)
        scores = score(logits.astype(jnp.float32), config)
        choice = scores if self.correction_bias is None else scores + self.correction_bias[...]
        _, experts = lax.top_k(keep_best_groups(choice, config), config.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.norm_topk_prob:
            epsilon = 1e-20 if config.scoring == "sigmoid" else 0.0
            weights = weights / (row_sum(weights) + epsilon)
        return experts, (weights * config.routed_scaling_factor).astype(logits.dtype)


def score(logits: Float[Array, "tokens experts"], config: MoeConfig) -> jax.Array:
    """Each expert's score."""
    if config.scoring == "sigmoid":
        return jax.nn.sigmoid(logits)
    # The maximum cancels out, in the gradient too.
    exponentials = jnp.exp(logits - lax.stop_gradient(logits.max(-1, keepdims=True)))
    return exponentials / row_sum(exponentials)


def keep_best_groups(choice: Float[Array, "tokens experts"], config: MoeConfig) -> jax.Array:
    """Rules out the experts of all but the best `topk_group` groups."""
    if config.group_score == "none":
        return choice
    grouped = choice.reshape(choice.shape[0], config.n_group, -1)
    if config.group_score == "max":
        group_scores, ruled_out = grouped.max(-1), 0.0
    else:
        best_two, _ = lax.top_k(grouped, 2)
        group_scores, ruled_out = best_two.sum(-1), -jnp.inf
    _, kept = lax.top_k(group_scores, config.topk_group)
    keep = (kept[:, :, None] == jnp.arange(config.n_group)).any(1)
    return jnp.where(keep[:, :, None], grouped, ruled_out).reshape(choice.shape)
