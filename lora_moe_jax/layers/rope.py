"""Rotary position embedding: plain, linear-scaled, YaRN; rotate-half or interleaved pairs."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from lora_moe_jax.config.model import RopeConfig


def apply_rope(
    x: Float[Array, "tokens heads width"], positions: Int[Array, " tokens"], rope: RopeConfig
) -> Float[Array, "tokens heads width"]:
    """Rotates the first `rope.dim` features of each head in float32; the rest pass through.

    Interleaved pairs (2j, 2j+1) come out de-interleaved, as DeepSeek-V3 writes them; scores do
    not depend on the order as queries and keys share it.
    """
    half = rope.dim // 2
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(rope))
    factor = attention_factor(rope)
    cos, sin = (jnp.expand_dims(f(angles) * factor, 1) for f in (jnp.cos, jnp.sin))
    wide = x[..., : rope.dim].astype(jnp.float32)
    if rope.interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide[..., :half], wide[..., half:]
    # Of two products that are added, the compiler may fuse either with the addition, and rounds
    # differently. Behind the barrier one of them is a finished number.
    first_sin, second_sin = lax.optimization_barrier((first * sin, second * sin))
    rotated = jnp.concatenate([first * cos - second_sin, second * cos + first_sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., rope.dim :]], axis=-1)


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
