"""Multi-head latent attention, with exact LoRA on every projection.

The cache holds the normed latent and the rotated rope key, never the heads. kv_b, which makes heads
of latents, is a part of attention: `latent_attention` takes its weight and its LoRA factors by
head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from lora_moe_jax.adapters.bank import KvBLora
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.config.model import MlaConfig, ModelConfig
from lora_moe_jax.layers.adapter_slots import AdapterSlots, adapter_slots, lora_of, zero_slots
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.layers.lanes import whole_lanes
from lora_moe_jax.layers.linear import FusedLinear, Linear, Part
from lora_moe_jax.layers.norm import RmsNorm, Unnormed
from lora_moe_jax.layers.rope import cos_sin, mla_softmax_scale
from pallas_kernels import ColumnsOf, KvB, Lora, latent_attention, rotate_and_cache_latents

MLA_NORM_EPS = 1e-6  # of the latent norms, whatever the configuration says


class LatentAttention(nnx.Module):
    """MLA: q (plain or through q_a, q_b), kv_a, absorbed kv_b, o, each with adapters."""

    def __init__(self, name: str, config: ModelConfig, build: Build):
        mla, hidden = config.mla, config.hidden_size
        self.config = config
        head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        queries = config.num_heads * head
        bias = config.attention_bias
        if mla.q_lora_rank is None:
            q = Part(f"{name}.q_proj", queries, "heads")
        else:
            q = Part(f"{name}.q_a_proj", mla.q_lora_rank, bias=bias)
        kv_width = mla.kv_lora_rank + mla.qk_rope_head_dim
        kv_a = Part(f"{name}.kv_a_proj_with_mqa", kv_width, bias=bias)
        self.in_proj = FusedLinear((q, kv_a), hidden, build)
        if mla.q_lora_rank is not None:
            self.q_a_layernorm = RmsNorm(
                f"{name}.q_a_layernorm", mla.q_lora_rank, MLA_NORM_EPS, build
            )
            self.q_b_proj = Linear(
                f"{name}.q_b_proj", mla.q_lora_rank, queries, build, out_axis="heads"
            )
        self.kv_a_layernorm = RmsNorm(
            f"{name}.kv_a_layernorm", mla.kv_lora_rank, MLA_NORM_EPS, build
        )
        self.kv_b_proj = AbsorbedKvB(f"{name}.kv_b_proj", config, build)
        self.o_proj = Linear(
            f"{name}.o_proj",
            config.num_heads * mla.v_head_dim,
            hidden,
            build,
            in_axis="heads",
            bias=bias,
        )

    @staticmethod
    def cache_shapes(config: ModelConfig, tensor_devices: int = 1) -> tuple[tuple[int, ...], ...]:
        """Per-token shapes of the latent and the rope key; every device holds both whole.

        On TPUs rope keys have zeros up to 128 columns. They take the memory of as many there, and
        XLA lays narrower arrays out the other way around, and copies them for attention's kernel.
        """
        return (config.mla.kv_lora_rank,), (whole_lanes(config.mla.qk_rope_head_dim),)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"] | Unnormed,
        positions: Int[Array, " tokens"],
        token_slots: Int[Array, " tokens"],
        cache: LayerCache,
    ) -> tuple[Float[Array, "tokens hidden"], LayerCache]:
        mla, rope = self.config.mla, self.config.rope
        joined, width = self.in_proj(x, token_slots), self.in_proj.widths[0]
        q, kv = ColumnsOf(joined), ColumnsOf(joined, width)
        if mla.q_lora_rank is not None:
            q_a = self.q_a_layernorm(joined[:, :width])
            q = ColumnsOf(self.q_b_proj(q_a, token_slots))
        head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        q_nope, q_rope, first, second = rotate_and_cache_latents(
            q,
            kv,
            self.kv_a_layernorm.weight[...],
            *cos_sin(positions, rope),
            cache.first,
            cache.second,
            cache.view,
            heads=self.kv_b_proj.k_up[...].shape[0],
            nope=mla.qk_nope_head_dim,
            eps=MLA_NORM_EPS,
            interleaved=rope.interleaved,
        )
        cache = cache._replace(first=first, second=second)
        out = latent_attention(
            q_nope,
            q_rope,
            cache.first,
            cache.second,
            cache.view,
            self.kv_b_proj.by_head(),
            token_slots,
            scale=mla_softmax_scale(rope, head),
        )
        return self.o_proj(out.reshape(x.shape[0], -1), token_slots), cache


class AbsorbedKvB(nnx.Module):
    """kv_b split by head into key rows (transposed) and value rows; as are its adapters.

    Weights: k_up `[heads, kv_lora_rank, nope]`, v_up `[heads, v_head_dim, kv_lora_rank]`.
    """

    def __init__(self, name: str, config: ModelConfig, build: Build):
        mla, heads = config.mla, config.num_heads
        self.mla = mla
        self.k_up = build.weight(
            (heads, mla.kv_lora_rank, mla.qk_nope_head_dim),
            ("heads", None, None),
            (f"{name}.weight",),
            KeyRows(mla),
        )
        self.v_up = build.weight(
            (heads, mla.v_head_dim, mla.kv_lora_rank),
            ("heads", None, None),
            (f"{name}.weight",),
            ValueRows(mla),
        )
        width = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        projection = Projection(name, mla.kv_lora_rank, width)
        self.slots = adapter_slots(projection, build, KvBSlots, mla=mla)

    def by_head(self) -> KvB:
        """The weights and adapters in the form that attention takes."""
        key, value = (
            lora_of(self.slots, form) for form in (KvBSlots.key_lora, KvBSlots.value_lora)
        )
        return KvB(self.k_up[...], self.v_up[...], key, value)


class KvBSlots(AdapterSlots):
    """kv_b's adapter slots, with B by head and split as the weight is.

    Shapes: a `[slots, 1, rank, latent]`, b_key `[slots, heads, rank, nope]`, b_value
    `[slots, heads, rank, v]`, scaling float32 `[slots, 1]`.
    """

    def __init__(self, projection: Projection, build: Build, mla: MlaConfig):
        self.projection = projection
        rank = build.adapters.rank
        heads = projection.out_features // (mla.qk_nope_head_dim + mla.v_head_dim)
        by_head = ("heads", None, None)
        self.a = zero_slots(build, (1, rank, projection.in_features), (None, None, None))
        self.b_key = zero_slots(build, (heads, rank, mla.qk_nope_head_dim), by_head)
        self.b_value = zero_slots(build, (heads, rank, mla.v_head_dim), by_head)
        self.scaling = zero_slots(build, (1,), (None,), "float32")

    def lora(self) -> KvBLora:
        """The arrays in the form that the bank writes."""
        return KvBLora(self.a[...], self.b_key[...], self.b_value[...], self.scaling[...])

    def key_lora(self) -> Lora:
        """The adapters of queries times W_UK: B inside, one for each head, A outside."""
        return Lora(self.b_key[...], self.a[...], self.scaling[...])

    def value_lora(self) -> Lora:
        """The adapters of latents times W_UVᵀ: A inside, B outside, one for each head."""
        return Lora(self.a[...], self.b_value[...], self.scaling[...])


@dataclass(frozen=True)
class KeyRows:
    """k_up from kv_b: each head's key rows, transposed."""

    mla: MlaConfig

    def load(self, kv_b: np.ndarray) -> np.ndarray:
        return _by_head(kv_b, self.mla)[:, : self.mla.qk_nope_head_dim].transpose(0, 2, 1)

    def store(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return (parameter.transpose(0, 2, 1),)


@dataclass(frozen=True)
class ValueRows:
    """v_up from kv_b: each head's value rows."""

    mla: MlaConfig

    def load(self, kv_b: np.ndarray) -> np.ndarray:
        return _by_head(kv_b, self.mla)[:, self.mla.qk_nope_head_dim :]

    def store(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return (parameter,)


def _by_head(kv_b: np.ndarray, mla: MlaConfig) -> np.ndarray:
    return kv_b.reshape(-1, mla.qk_nope_head_dim + mla.v_head_dim, kv_b.shape[-1])
