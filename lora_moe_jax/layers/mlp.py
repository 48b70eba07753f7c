"""The gated MLP of dense layers and shared experts."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int

from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.layers.adapter_slots import adapter_slots, lora_of
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.checkpoint_layout import Stacked
from lora_moe_jax.layers.linear import Linear
from lora_moe_jax.layers.norm import Unnormed
from pallas_kernels import Gate, lora_matmul


class Mlp(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product, weight `[2, width, hidden]`."""

    def __init__(self, name: str, hidden: int, width: int, build: Build):
        leaves = ("gate_proj", "up_proj")
        self.gate_up = build.weight(
            (2, width, hidden),
            (None, "mlp", None),
            tuple(f"{name}.{leaf}.weight" for leaf in leaves),
            Stacked(),
        )
        self.gate_slots, self.up_slots = (
            adapter_slots(Projection(f"{name}.{leaf}", hidden, width), build, out_axis="mlp")
            for leaf in leaves
        )
        self.down_proj = Linear(f"{name}.down_proj", width, hidden, build, in_axis="mlp")

    def __call__(
        self, x: Float[Array, "tokens hidden"], token_slots: Int[Array, " tokens"]
    ) -> Float[Array, "tokens hidden"]:
        weights, options = self._gate_up(token_slots)
        return self.down_proj(lora_matmul(x, *weights, **options), token_slots)

    def of_unnormed(
        self, rows: Unnormed, token_slots: Int[Array, " tokens"]
    ) -> Float[Array, "tokens hidden"]:
        """The rows' sum + the MLP of that normed."""
        weights, options = self._gate_up(token_slots)
        total, _, hidden = rows.product(*weights, **options)
        return total + self.down_proj(hidden, token_slots)

    def _gate_up(self, token_slots) -> tuple[tuple, dict]:
        """Arguments of `lora_matmul`, by place and by name."""
        weight = self.gate_up[...]
        width = weight.shape[1]
        lora = lora_of(self.gate_slots), lora_of(self.up_slots)
        weights = weight.reshape(2 * width, -1), token_slots, lora
        return weights, dict(parts=(width, width), gate=Gate())
