"""The least work of a step of a whole model: every weight, adapter and cached position once."""

from __future__ import annotations

import dataclasses
import math

from flax import nnx

from lora_moe_jax.bench.roofline import Work
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.adapter_slots import AdapterSlots, LoraParam
from lora_moe_jax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Numbers of values.

    Attributes:
      item: bytes of a value.
      dense: weights that every step reads, the output head among them.
      experts: weights of the routed experts.
      dense_slot, expert_slot: of one adapter slot, at the bank's rank.
      position: of one cached position, in all layers.
      attention: multiplied pairs of one token and one position, in all layers.
    """

    config: ModelConfig
    item: int
    dense: int
    experts: int
    dense_slot: int
    expert_slot: int
    position: int
    attention: int

    @classmethod
    def of(cls, model: Decoder) -> ModelSizes:
        config = model.config
        dense = experts = dense_slot = expert_slot = 0
        routed = {
            path
            for path, node in nnx.iter_graph(model)
            if isinstance(node, AdapterSlots) and node.projection.groups > 1
        }
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            size = math.prod(variable.shape)
            if path[-1] == "scaling":
                continue
            if isinstance(variable, LoraParam):
                if path[:-1] in routed:
                    expert_slot += size // variable.shape[0]
                else:
                    dense_slot += size // variable.shape[0]
            elif "experts" in path:
                experts += size
            elif "embed_tokens" not in path or config.tie_word_embeddings:
                dense += size
        if config.mla is None:
            position = 2 * config.num_kv_heads * config.head_dim
            widths = 2 * config.head_dim
        else:
            position = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
            widths = position + config.mla.kv_lora_rank
        layers = config.num_layers
        attention = layers * config.num_heads * widths
        slots = dense_slot, expert_slot
        item = model.norm.weight.dtype.itemsize
        return cls(config, item, dense, experts, *slots, layers * position, attention)

    def step(self, requests: int, tokens: int, context: int, adapters: int) -> Work:
        """A step of `tokens` tokens in each request, the last of them at `context`.

        Experts are chosen uniformly. The requests' adapters are `adapters` in turns; 0: none.
        """
        moe, rows = self.config.moe, requests * tokens
        used = adapters and min(adapters, requests)
        experts, buckets, active = 0.0, 0.0, 0.0
        if moe is not None:
            experts = self.experts * _share_of_experts(moe, rows)
            active = self.experts * moe.top_k / moe.num_experts
            if used:
                buckets = used * self.expert_slot * _share_of_experts(moe, rows / used)
        moved = self.dense + experts + used * self.dense_slot + buckets
        moved += requests * self.seen(context, tokens) * self.position
        adapted = 0.0
        if used:
            adapted = self.dense_slot + self.expert_slot * (
                moe.top_k / moe.num_experts if moe else 0
            )
        seen = requests * sum(map(self.seen, range(context - tokens + 1, context + 1)))
        flops = 2 * (rows * (self.dense + active + adapted) + self.attention * seen)
        return Work(flops, self.item * moved)

    def seen(self, context: int, tokens: int = 1) -> float:
        """Positions that the last `tokens` of `context` attend to, of the mean layer."""
        layers = range(self.config.num_layers)
        windows = [self.config.window(layer) or context for layer in layers]
        return sum(min(window + tokens - 1, context) for window in windows) / len(windows)

    def training_flops(self, sequences: int, length: int) -> float:
        """Useful FLOPs of a pass forward and back over whole sequences, all with an adapter.

        Base weights are multiplied once forward and once back, adapters' factors twice back, and so
        are attention's pairs. What an implementation computes again does not count.
        """
        moe, tokens = self.config.moe, sequences * length
        part = moe.top_k / moe.num_experts if moe else 0
        base = self.dense + self.experts * part
        factors = self.dense_slot + self.expert_slot * part
        seen = sequences * sum(map(self.seen, range(1, length + 1)))
        return 2 * (tokens * (2 * base + 3 * factors) + 3 * self.attention * seen)


def _share_of_experts(moe, rows: float) -> float:
    """The part of the experts that so many tokens are expected to choose."""
    return 1 - (1 - moe.top_k / moe.num_experts) ** rows
