"""The mixture-of-experts MLP: router, routed experts with per-expert adapters, shared experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.adapter_slots import adapter_slots, lora_of
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.choice_bias import bias_of_choices
from lora_moe_jax.layers.mlp import Mlp
from lora_moe_jax.layers.norm import Unnormed
from lora_moe_jax.layers.router import Router
from pallas_kernels import Gate, moe_mlp, routed_mlp
from pallas_kernels.rounded import added, rounded


class Experts(nnx.Module):
    """All routed experts of a layer: gate_up_proj `[E, 2, I, H]`, down_proj `[E, H, I]`.

    Biases, if there are any: gate_up_bias `[E, 2, I]`, and down_bias `[E, H]`, which is not added
    here: every device has that of all experts.
    """

    def __init__(self, name: str, config: ModelConfig, build: Build, gate: Gate | None):
        hidden, moe = config.hidden_size, config.moe
        self.gate = gate
        count, width = moe.num_experts, moe.expert_size
        self.gate_up_proj = build.weight(
            (count, 2, width, hidden), ("expert", None, "mlp", None), (f"{name}.gate_up_proj",)
        )
        self.down_proj = build.weight(
            (count, hidden, width), ("expert", None, "mlp"), (f"{name}.down_proj",)
        )
        self.gate_up_bias, self.down_bias = (
            build.bias(shape, axes, f"{name}.{leaf}_bias") if moe.bias else None
            for leaf, shape, axes in (
                ("gate_up_proj", (count, 2, width), ("expert", None, "mlp")),
                ("down_proj", (count, hidden), (None, None)),
            )
        )

        def slots(leaf, n_in, n_out, **axes):
            projection = Projection(f"{name}.{leaf}", n_in, n_out, count, "expert", moe.interleaved)
            return adapter_slots(projection, build, **axes)

        self.gate_slots = slots("gate_proj", hidden, width, out_axis="mlp")
        self.up_slots = slots("up_proj", hidden, width, out_axis="mlp")
        self.down_slots = slots("down_proj", width, hidden, in_axis="mlp")

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        experts: Int[Array, "tokens choices"],
        weights: Float[Array, "tokens choices"],
        token_slots: Int[Array, " tokens"],
        first_expert: int | Int[Array, ""],
        valid: Bool[Array, " tokens"] | None,
    ) -> Float[Array, "tokens hidden"]:
        """Sums the choices of this device's experts, from `first_expert` on."""
        weights_of_layer, options = self._weights()
        return moe_mlp(
            x,
            experts,
            weights,
            token_slots,
            *weights_of_layer,
            **options,
            first_group=first_expert,
            valid=valid,
        )

    def chosen(
        self,
        x: Float[Array, "tokens hidden"],
        logits: Float[Array, "tokens experts"],
        router: Router,
        token_slots: Int[Array, " tokens"],
        valid: Bool[Array, " tokens"] | None,
        residual: Float[Array, "tokens hidden"] | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The sum, experts and weights of `routed_mlp`: all experts are on this device."""
        weights_of_layer, options = self._weights()
        return routed_mlp(
            x,
            logits,
            token_slots,
            *weights_of_layer,
            **options,
            top_k=router.config.top_k,
            scoring=router.scoring,
            correction=router.correction,
            valid=valid,
            residual=residual,
        )

    def _weights(self) -> tuple[tuple, dict]:
        """Arguments of `moe_mlp`, by place and by name."""
        gate_up, bias = self.gate_up_proj[...], self.gate_up_bias
        count, _, width, hidden = gate_up.shape
        slots = self.gate_slots, self.up_slots, self.down_slots
        weights = gate_up.reshape(count, 2 * width, hidden), self.down_proj[...]
        bias = None if bias is None else bias[...].reshape(count, 2 * width)
        return (*weights, *map(lora_of, slots)), dict(gate_up_bias=bias, gate=self.gate)


class MoeMlp(nnx.Module):
    """y = Σ_k weight_k · expert_k(x) + shared(x)."""

    def __init__(self, name: str, config: ModelConfig, build: Build, gate: Gate | None = None):
        """Args: `gate` is the activation; None is silu."""
        self.axes = build.axes
        self.expert_axis = build.mesh_axis("expert")
        self.width_axis = build.mesh_axis("mlp")
        self.gate = Router(f"{name}.{config.moe.router}", config.hidden_size, config.moe, build)
        self.experts = Experts(f"{name}.experts", config, build, gate)
        self.shared_experts = (
            Mlp(f"{name}.shared_experts", config.hidden_size, config.moe.shared_size, build)
            if config.moe.shared_size
            else None
        )

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        token_slots: Int[Array, " tokens"],
        valid: Bool[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """Args: `valid` is False for padding tokens, which no expert then works on."""
        return self.routed(x, token_slots, valid)[0]

    def routed(
        self,
        x: Float[Array, "tokens hidden"],
        token_slots: Int[Array, " tokens"],
        valid: Bool[Array, " tokens"] | None,
    ) -> tuple[Float[Array, "tokens hidden"], Int[Array, "tokens choices"]]:
        """y, and the experts of each token, the one it likes best first."""
        return self._of_logits(x, self.gate.logits(x, token_slots), token_slots, valid, None)

    def of_unnormed(
        self,
        rows: Unnormed,
        token_slots: Int[Array, " tokens"],
        valid: Bool[Array, " tokens"] | None,
    ) -> tuple[Float[Array, "tokens hidden"], Int[Array, "tokens choices"]]:
        """The rows' sum + y of that normed, and the experts."""
        total, x, logits = self.gate.of_unnormed(rows, token_slots)
        return self._of_logits(x, logits, token_slots, valid, total)

    def _of_logits(self, x, logits, token_slots, valid, residual):
        """y, or residual + y, and the experts."""
        rest = self.expert_axis, self.width_axis, self.experts.down_bias, self.shared_experts
        at_once = residual if all(its is None for its in rest) else None
        if self.expert_axis is None and self.gate.config.group_score == "none":
            of_tokens = self.gate, token_slots, valid, at_once
            routed, experts, weights = self.experts.chosen(x, logits, *of_tokens)
            if at_once is not None:
                return routed, experts
        else:
            experts, weights = self.gate.choose(logits)
            first = self.axes.index(self.expert_axis) * self.experts.down_proj[...].shape[0]
            routed = self.experts(x, experts, weights, token_slots, first, valid)
        y = self.axes.sum(routed, self.expert_axis, self.width_axis)
        if self.experts.down_bias is not None:
            bias = jnp.asarray(self.experts.down_bias[...])
            y = y + bias_of_choices(bias, experts, weights)
        y = rounded(y, x.dtype)
        if self.shared_experts is not None:
            y = added(y, self.shared_experts(x, token_slots))
        return y if residual is None else added(residual, y), experts
