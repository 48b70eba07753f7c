"""The decoder that every family shares; families differ in what their layers are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.layers.embedding import Embedding, OutputHead
from lora_moe_jax.layers.experts import MoeMlp
from lora_moe_jax.layers.norm import RmsNorm, Unnormed
from lora_moe_jax.models.layer_loop import loop, loops
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
        rows = Unnormed(x, None, self.input_layernorm)
        attended, cache = self.self_attn(rows, view.positions, token_slots, cache)
        rows = Unnormed(x, attended, self.post_attention_layernorm)
        if isinstance(self.mlp, MoeMlp):
            x, experts = self.mlp.of_unnormed(rows, token_slots, view.request >= 0)
            return x, cache, experts
        return self.mlp.of_unnormed(rows, token_slots), cache, None


class Decoder(nnx.Module):
    """Embedding, layers, final norm, output head."""

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        make_layer: Callable[[int, ModelConfig, Build], DecoderLayer],
    ):
        self.config = config
        self.embed_tokens = Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, build
        )
        self.layers = nnx.List([make_layer(i, config, build) for i in range(config.num_layers)])
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
        cache: LayerCache,
        *,
        routed: bool = False,
    ) -> tuple[Float[Array, "tokens hidden"], LayerCache, list[Int[Array, "tokens choices"]]]:
        """Final normed hidden states of a flat batch, the cache with its tokens added, and if
        `routed` the experts that its tokens went to in each layer that has a router.

        Args:
          cache: of all layers, one after the other, with the view of the first.
        """
        shared = SharedLayers()

        def call(number, layer, carry):
            x, *pages = carry
            own = cache._replace(first=pages[0], second=pages[1])
            x, own, experts = layer(x, token_slots, own.of_layer(number, len(self.layers)))
            return (x, own.first, own.second), experts if routed else None

        carry, choices = (self.embed_tokens(tokens, token_slots), cache.first, cache.second), []
        for run in loops(self.layers):
            if len(run) > 1:
                kinds = [self.config.kind(number) for number in run]
                carry, experts = loop(self.layers, run, kinds, call, carry, len(tokens))
                choices += [] if experts is None else list(experts)
            else:
                (number,) = run
                kind, layer = self.config.kind(number), self.layers[number]
                carry, experts = call(number, functools.partial(shared, kind, layer), carry)
                choices += [] if experts is None else [experts]
        x, first, second = carry
        return self.norm(x), cache._replace(first=first, second=second), choices

    def logits(
        self, hidden: Float[Array, "rows hidden"], row_slots: Int[Array, " rows"]
    ) -> Float[Array, "rows vocab"]:
        """float32 logits of hidden states."""
        return self.lm_head(hidden, row_slots, self.embed_tokens)
