"""DeepSeek-V2 and V3 (also Kimi-K2, GLM-4.7-Flash): latent attention, routed and shared experts.

V2 and V3 differ in how experts are scored and chosen, which their configurations carry.
"""

from __future__ import annotations

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.experts import MoeMlp
from lora_moe_jax.layers.mla import LatentAttention
from lora_moe_jax.layers.mlp import Mlp
from lora_moe_jax.models.decoder import DecoderLayer


def make_layer(number: int, config: ModelConfig, build: Build) -> DecoderLayer:
    """One decoder layer."""
    name = f"model.layers.{number}"
    attention = LatentAttention(f"{name}.self_attn", config, build)
    if config.is_sparse(number):
        mlp = MoeMlp(f"{name}.mlp", config, build)
    else:
        mlp = Mlp(f"{name}.mlp", config.hidden_size, config.intermediate_size, build)
    return DecoderLayer(name, config, build, attention, mlp)
