"""Grouped-query attention with per-head query and key norms (Qwen3)."""

from __future__ import annotations

import jax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.layers.linear import FusedLinear, Linear, Part
from lora_moe_jax.layers.norm import RmsNorm
from lora_moe_jax.layers.rope import apply_rope
from pallas_kernels import paged_attention, write_pages


class Attention(nnx.Module):
    """q, k, v, o projections with adapters, q/k norms, rope, paged attention."""

    def __init__(self, name: str, config: ModelConfig, build: Build):
        hidden, width, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.config = config
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
        self.q_norm = RmsNorm(f"{name}.q_norm", width, config.rms_norm_eps, build)
        self.k_norm = RmsNorm(f"{name}.k_norm", width, config.rms_norm_eps, build)

    @staticmethod
    def cache_shapes(config: ModelConfig, tensor_devices: int = 1) -> tuple[tuple[int, ...], ...]:
        """Per-token shapes of the key and the value cache over all devices."""
        heads = max(config.num_kv_heads, tensor_devices)
        return ((heads, config.head_dim),) * 2

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        positions: Int[Array, " tokens"],
        token_slots: Int[Array, " tokens"],
        cache: LayerCache,
    ) -> tuple[Float[Array, "tokens hidden"], LayerCache]:
        tokens, width, rope = x.shape[0], self.config.head_dim, self.config.rope
        q, k, v = (part.reshape(tokens, -1, width) for part in self.qkv_proj(x, token_slots))
        q = apply_rope(self.q_norm(q), positions, rope)
        k = apply_rope(self.k_norm(self._local_kv(k)), positions, rope)
        v = self._local_kv(v)
        cache = cache._replace(
            first=write_pages(cache.first, k, cache.view),
            second=write_pages(cache.second, v, cache.view),
        )
        out = paged_attention(
            q,
            cache.first,
            cache.second,
            cache.view,
            scale=width**-0.5,
            sliding_window=self.config.sliding_window,
        )
        return self.o_proj(out.reshape(tokens, -1), token_slots), cache

    def _local_kv(self, heads: jax.Array) -> jax.Array:
        if not self.kv_replicated:
            return heads
        devices = lax.axis_size(self.axes.tensor)
        head = self.axes.index(self.axes.tensor) * self.config.num_kv_heads // devices
        return lax.dynamic_slice_in_dim(heads, head, 1, axis=1)
