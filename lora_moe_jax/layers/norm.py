"""RMS normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.reduce import row_sum


class RmsNorm(nnx.Module):
    """x / rms(x) in float32, cast back to x's dtype, times the weight."""

    def __init__(self, name: str, size: int, eps: float, build: Build):
        self.eps = eps
        self.weight = build.scale(size, f"{name}.weight")

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        wide = x.astype(jnp.float32)
        mean_square = row_sum(wide * wide) / x.shape[-1]
        normed = (wide * lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * self.weight[...].astype(x.dtype)
