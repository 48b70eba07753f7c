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
from lora_moe_jax.layers.norm import Unnormed
from pallas_kernels import Scoring, top_experts
from pallas_kernels.rounded import rounded
from pallas_kernels.top_experts.xla import score, weights_of


class Router(nnx.Module):
    """Softmax or sigmoid scores, optional expert groups and correction bias, top-k.

    Ties go to the expert with the lower number. Weights are float32 for DeepSeek, in the
    activations' dtype for Qwen3 and gpt-oss, as in the models' own code.
    """

    def __init__(self, name: str, hidden: int, config: MoeConfig, build: Build):
        self.config = config
        experts = config.num_experts
        self.proj = Linear(name, hidden, experts, build, bias=config.bias, kind="router")
        self.correction_bias = (
            build.bias((experts,), (None,), f"{name}.e_score_correction_bias", dtype="float32")
            if config.correction_bias
            else None
        )

    def __call__(
        self, x: Float[Array, "tokens hidden"], token_slots: Int[Array, " tokens"]
    ) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
        return self.choose(self.logits(x, token_slots))

    def logits(
        self, x: Float[Array, "tokens hidden"], token_slots: Int[Array, " tokens"]
    ) -> Float[Array, "tokens experts"]:
        return self.proj(x, token_slots, self._dtype)

    def of_unnormed(
        self, rows: Unnormed, token_slots: Int[Array, " tokens"]
    ) -> tuple[jax.Array, jax.Array, Float[Array, "tokens experts"]]:
        """The rows' sum, that normed, and logits of it."""
        return self.proj.of_unnormed(rows, token_slots, self._dtype)

    @property
    def _dtype(self):
        """Products of bfloat16 are exact in float32, where they are summed: x stays as it is."""
        return jnp.float32 if self.config.router_float32 else None

    @property
    def correction(self) -> jax.Array | None:
        """What is added to scores before they are compared."""
        bias = self.correction_bias
        return None if bias is None else bias[...]

    @property
    def scoring(self) -> Scoring:
        config = self.config
        return Scoring(
            config.scoring == "sigmoid", config.norm_topk_prob, config.routed_scaling_factor
        )

    def choose(
        self, logits: Float[Array, "tokens experts"]
    ) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
        choose = top_experts if self.config.group_score == "none" else self._of_best_groups
        experts, weights = choose(logits, self.correction, self.config.top_k, self.scoring)
        return experts, rounded(weights, logits.dtype)

    def _of_best_groups(self, logits, bias, top_k: int, scoring: Scoring):
        scores = score(logits, scoring)
        choice = scores if bias is None else scores + bias
        _, experts = lax.top_k(keep_best_groups(choice, self.config), top_k)
        return experts, weights_of(scores, experts, scoring)


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
