"""RMS normalisation."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from lora_moe_jax.layers.build import Build
from pallas_kernels import add_norm, rms_norm


class RmsNorm(nnx.Module):
    """x / rms(x) in float32, cast back to x's dtype, times the weight."""

    def __init__(self, name: str, size: int, eps: float, build: Build):
        self.eps = eps
        self.weight = build.scale(size, f"{name}.weight")

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        return rms_norm(x, self.weight[...], self.eps)

    def of_sum(
        self, x: Float[Array, "*rows size"], more: Float[Array, "*rows size"]
    ) -> tuple[Float[Array, "*rows size"], Float[Array, "*rows size"]]:
        """x + more, and it normed."""
        return add_norm(x, more, self.weight[...], self.eps)
