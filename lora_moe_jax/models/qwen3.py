"""Qwen3 and Qwen3-MoE: grouped-query attention with q/k norms, dense or routed gated MLPs."""

from __future__ import annotations

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.attention import Attention
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.experts import MoeMlp
from lora_moe_jax.layers.mlp import Mlp
from lora_moe_jax.models.decoder import DecoderLayer


def make_layer(number: int, config: ModelConfig, build: Build) -> DecoderLayer:
    """One decoder layer."""
    name = f"model.layers.{number}"
    attention = Attention(f"{name}.self_attn", config, build, config.window(number))
    if config.is_sparse(number):
        mlp = MoeMlp(f"{name}.mlp", config, build)
    else:
        mlp = Mlp(f"{name}.mlp", config.hidden_size, config.intermediate_size, build)
    return DecoderLayer(name, config, build, attention, mlp)
