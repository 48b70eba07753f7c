"""gpt-oss: grouped-query attention with sinks, every other layer within a window; routed experts
with biases and a gate of their own."""

from __future__ import annotations

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.attention import Attention
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.experts import MoeMlp
from lora_moe_jax.models.decoder import DecoderLayer
from pallas_kernels import Gate

GATE = Gate(limit=7.0, alpha=1.702, up_offset=1.0)


def make_layer(number: int, config: ModelConfig, build: Build) -> DecoderLayer:
    """One decoder layer."""
    name = f"model.layers.{number}"
    attention = Attention(f"{name}.self_attn", config, build, config.window(number))
    return DecoderLayer(name, config, build, attention, MoeMlp(f"{name}.mlp", config, build, GATE))
