"""Token embedding and output head, both with adapters."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.layers.adapter_slots import adapter_slots, lora_of
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.embedding_lora import columns, plus_rows, scalings
from pallas_kernels import lora_matmul


class Embedding(nnx.Module):
    """E[token] + s · A[slot, :, token] · B[slot]; rows are split over the vocabulary on a mesh."""

    def __init__(self, name: str, vocab: int, hidden: int, build: Build):
        self.axes = build.axes
        self.vocab_axis = build.mesh_axis("vocab")
        self.weight = build.weight((vocab, hidden), ("vocab", None), (f"{name}.weight",))
        projection = Projection(name, vocab, hidden, kind="embedding")
        self.slots = adapter_slots(projection, build, in_axis="vocab")

    def __call__(
        self, tokens: Int[Array, " tokens"], token_slots: Int[Array, " tokens"]
    ) -> Float[Array, "tokens hidden"]:
        weight = self.weight[...]
        local = tokens - self.axes.index(self.vocab_axis) * weight.shape[0]
        here = ((local >= 0) & (local < weight.shape[0]))[:, None]
        row = jnp.clip(local, 0, weight.shape[0] - 1)
        x = self.axes.the_one(jnp.where(here, weight[row], 0), self.vocab_axis)
        if self.slots is None:
            return x
        lora = lora_of(self.slots)
        u = jnp.where(here, columns(lora, token_slots, row).astype(jnp.float32), 0)
        u = self.axes.the_one(u, self.vocab_axis) * scalings(lora, token_slots)
        y = plus_rows(x.astype(jnp.float32), u, lora, token_slots)
        return jnp.where((token_slots >= 0)[:, None], y.astype(x.dtype), x)


class OutputHead(nnx.Module):
    """Hidden states to logits in float32; with tied embeddings it has adapters but no weight."""

    def __init__(self, name: str, hidden: int, vocab: int, build: Build, *, tied: bool):
        self.axes = build.axes
        self.vocab_axis = build.mesh_axis("vocab")
        self.weight = (
            None if tied else build.weight((vocab, hidden), ("vocab", None), (f"{name}.weight",))
        )
        projection = Projection(name, hidden, vocab, kind="head")
        self.slots = adapter_slots(projection, build, out_axis="vocab")

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        token_slots: Int[Array, " tokens"],
        embedding: Embedding,
    ) -> Float[Array, "tokens vocab"]:
        weight = embedding.weight if self.weight is None else self.weight
        logits = lora_matmul(x, weight[...], token_slots, (lora_of(self.slots),))
        return self.axes.all_gather(logits, self.vocab_axis, 1).astype(jnp.float32)
