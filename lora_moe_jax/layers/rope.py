"""Rotary position embedding: plain, linear-scaled, YaRN; rotate-half or interleaved pairs."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lora_moe_jax.config.model import RopeConfig


def cos_sin(
    positions: Int[Array, " tokens"], rope: RopeConfig
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """float32 cosines and sines of each pair's angle."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(rope))
    factor = attention_factor(rope)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """float32 [dim / 2]: radians per position of each pair."""
    j = np.arange(rope.dim // 2)
    inverse = rope.theta ** (-2.0 * j / rope.dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "yarn":
        keep = 1 - _yarn_ramp(rope)
        inverse = inverse * keep + inverse / rope.factor * (1 - keep)
    return inverse.astype(np.float32)


def _yarn_ramp(rope: RopeConfig) -> np.ndarray:
    """0 for the fast pairs that stay as trained, 1 for the slow ones that are interpolated."""

    def bound(rotations: float) -> float:
        periods = rope.original_max_position / (2 * math.pi * rotations)
        return rope.dim * math.log(periods) / (2 * math.log(rope.theta))

    low, high = bound(rope.beta_fast), bound(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # the ramp is a step then
    return np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0, 1)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's correction of the attention temperature."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def mla_softmax_scale(rope: RopeConfig, width: int) -> float:
    """The score scale of DeepSeek's attention: 1/sqrt(width), times mscale² under YaRN."""
    scale = width**-0.5
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale
