"""The decoder that every family shares; families differ in what their layers are made of."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.layers.embedding import Embedding, OutputHead
from lora_moe_jax.layers.experts import MoeMlp
from lora_moe_jax.layers.norm import RmsNorm
from lora_moe_jax.models.shared_layers import SharedLayers


class DecoderLayer(nnx.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self, name: str, config: ModelConfig, build: Build, attention: nnx.Module, mlp: nnx.Module
    ):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(f"{name}.input_layernorm", hidden, eps, build)
        self.self_attn = attention
        self.post_attention_layernorm = RmsNorm(
            f"{name}.post_attention_layernorm", hidden, eps, build
        )
        self.mlp = mlp

    def __call__(
        self, x: Float[Array, "tokens hidden"], token_slots: jax.Array, cache: LayerCache
    ) -> tuple[Float[Array, "tokens hidden"], LayerCache, Int[Array, "tokens choices"] | None]:
        """x, the cache with the tokens added, and the experts they went to if there are any."""
        view = cache.view
        attended, cache = self.self_attn(
            self.input_layernorm(x), view.positions, token_slots, cache
        )
        x, normed = self.post_attention_layernorm.of_sum(x, attended)
        if isinstance(self.mlp, MoeMlp):
            y, experts = self.mlp.routed(normed, token_slots, view.request >= 0)
            return x + y, cache, experts
        return x + self.mlp(normed, token_slots), cache, None


class Decoder(nnx.Module):
    """Embedding, layers, final norm, output head."""

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        make_layer: Callable[[str, ModelConfig, bool, Build], DecoderLayer],
    ):
        self.config = config
        self.embed_tokens = Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, build
        )
        self.layers = nnx.List(
            [
                make_layer(f"model.layers.{i}", config, config.is_sparse(i), build)
                for i in range(config.num_layers)
            ]
        )
        self.norm = RmsNorm("model.norm", config.hidden_size, config.rms_norm_eps, build)
        self.lm_head = OutputHead(
            "lm_head",
            config.hidden_size,
            config.vocab_size,
            build,
            tied=config.tie_word_embeddings,
        )

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        token_slots: Int[Array, " tokens"],
        caches: list[LayerCache],
    ) -> tuple[Float[Array, "tokens hidden"], list[LayerCache], list[Int[Array, "tokens choices"]]]:
        """Final normed hidden states of a flat batch, the caches with its tokens added, and the
        experts that its tokens went to in each layer that has a router."""
        x = self.embed_tokens(tokens, token_slots)
        updated, choices, call = [], [], SharedLayers()
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x, cache, experts = call(self.config.is_sparse(i), layer, x, token_slots, cache)
            updated.append(cache)
            if experts is not None:
                choices.append(experts)
        return self.norm(x), updated, choices

    def logits(
        self, hidden: Float[Array, "rows hidden"], row_slots: Int[Array, " rows"]
    ) -> Float[Array, "rows vocab"]:
        """float32 logits of hidden states."""
        return self.lm_head(hidden, row_slots, self.embed_tokens)
