"""Grouped-query attention, with per-head query and key norms (Qwen3) or with sinks (gpt-oss)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.layers.lanes import filled_up, whole_lanes
from lora_moe_jax.layers.linear import FusedLinear, Linear, Part
from lora_moe_jax.layers.norm import RmsNorm, Unnormed
from lora_moe_jax.layers.rope import cos_sin
from pallas_kernels import rotated_attention


class Attention(nnx.Module):
    """q, k, v, o projections with adapters, q/k norms or none, rope, paged attention."""

    def __init__(self, name: str, config: ModelConfig, build: Build, window: int | None):
        hidden, width, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.config, self.window = config, window
        self.axes = build.axes
        # With fewer key/value heads than tensor devices, each device keeps the one it needs.
        self.kv_replicated = build.mesh_axis("heads") and not build.mesh_axis("kv_heads")
        keys = config.num_kv_heads * width
        self.qkv_proj = FusedLinear(
            (
                Part(f"{name}.q_proj", config.num_heads * width, "heads", bias),
                Part(f"{name}.k_proj", keys, "kv_heads", bias),
                Part(f"{name}.v_proj", keys, "kv_heads", bias),
            ),
            hidden,
            build,
        )
        self.o_proj = Linear(
            f"{name}.o_proj", config.num_heads * width, hidden, build, in_axis="heads", bias=bias
        )
        self.q_norm, self.k_norm = (
            RmsNorm(f"{name}.{leaf}", width, config.rms_norm_eps, build) if config.qk_norm else None
            for leaf in ("q_norm", "k_norm")
        )
        self.sinks = (
            build.bias((config.num_heads,), ("heads",), f"{name}.sinks") if config.sinks else None
        )

    @staticmethod
    def cache_shapes(config: ModelConfig, tensor_devices: int = 1) -> tuple[tuple[int, ...], ...]:
        """Per-token shapes of the key and the value cache over all devices.

        On TPUs each half of a head that is not normed has zeros up to half of whole lanes. They
        take the memory of as many there, and XLA would turn the cache around in every step.
        """
        heads, width = max(config.num_kv_heads, tensor_devices), config.head_dim
        return ((heads, width if config.qk_norm else whole_lanes(width)),) * 2

    def __call__(
        self,
        x: Float[Array, "tokens hidden"] | Unnormed,
        positions: Int[Array, " tokens"],
        token_slots: Int[Array, " tokens"],
        cache: LayerCache,
    ) -> tuple[Float[Array, "tokens hidden"], LayerCache]:
        tokens, width = x.shape[0], self.config.head_dim
        columns = cache.first.shape[-1]
        heads = self.qkv_proj(x, token_slots).reshape(tokens, -1, width)
        angles = cos_sin(positions, self.config.rope)
        out, first, second = rotated_attention(
            _with_zeros(self._local_heads(heads), columns),
            *(None if norm is None else norm.weight[...] for norm in (self.q_norm, self.k_norm)),
            *(filled_up(its, columns // 2) for its in angles),
            cache.first,
            cache.second,
            cache.view,
            eps=self.config.rms_norm_eps,
            scale=width**-0.5,
            sliding_window=self.window,
            sinks=None if self.sinks is None else jnp.asarray(self.sinks[...]),
        )
        cache = cache._replace(first=first, second=second)
        out = _without_zeros(out, width)
        return self.o_proj(out.reshape(tokens, -1), token_slots), cache

    def _local_heads(self, heads: jax.Array) -> jax.Array:
        """Queries, and of keys and values the heads that this device keeps."""
        if not self.kv_replicated:
            return heads
        kv_heads, devices = self.config.num_kv_heads, lax.axis_size(self.axes.tensor)
        queries = heads.shape[1] - 2 * kv_heads
        q, keys, values = jnp.split(heads, [queries, queries + kv_heads], axis=1)
        head = self.axes.index(self.axes.tensor) * kv_heads // devices
        mine = (lax.dynamic_slice_in_dim(kv, head, 1, axis=1) for kv in (keys, values))
        return jnp.concatenate([q, *mine], axis=1)


def _with_zeros(heads: jax.Array, columns: int) -> jax.Array:
    """Heads of so many columns: zeros after each half, as halves are rotated with each other."""
    *tokens, width = heads.shape
    if columns == width:
        return heads
    halves = heads.reshape(*tokens, 2, width // 2)
    return filled_up(halves, columns // 2).reshape(*tokens, columns)


def _without_zeros(heads: jax.Array, width: int) -> jax.Array:
    """The inverse of `_with_zeros`."""
    *tokens, columns = heads.shape
    if columns == width:
        return heads
    return heads.reshape(*tokens, 2, columns // 2)[..., : width // 2].reshape(*tokens, width)
