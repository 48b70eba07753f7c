"""RMS normalisation."""

from __future__ import annotations

from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from lora_moe_jax.layers.build import Build
from pallas_kernels import normed_lora_matmul, rms_norm


class RmsNorm(nnx.Module):
    """x / rms(x) in float32, cast back to x's dtype, times the weight."""

    def __init__(self, name: str, size: int, eps: float, build: Build):
        self.eps = eps
        self.weight = build.scale(size, f"{name}.weight")

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        return rms_norm(x, self.weight[...], self.eps)


class Unnormed(NamedTuple):
    """Rows that are normed for the product that they go into.

    Attributes:
      x: `[tokens, hidden]`. more: what is added to it first, or None.
    """

    x: jax.Array
    more: jax.Array | None
    norm: RmsNorm

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def product(
        self, w: Float[Array, "n hidden"], token_slots: Int[Array, " tokens"], *lora, **options
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The sum, that normed, and its product; see `normed_lora_matmul`."""
        weight, eps = self.norm.weight[...], self.norm.eps
        return normed_lora_matmul(self.x, self.more, weight, eps, w, token_slots, *lora, **options)
