"""A projection: one weight of the base model that an adapter may target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Projection:
    """Name and sizes of one targetable weight, as adapters and banks see it.

    Attributes:
      name: module path in the Hugging Face naming, e.g. `model.layers.0.self_attn.q_proj`,
        `model.layers.1.mlp.experts.gate_proj` (all experts of the layer are one projection),
        `model.layers.1.mlp.gate` (the router), `model.embed_tokens`, `lm_head`.
      in_features: width of the input; the vocabulary for `model.embed_tokens`.
      out_features: width of the output.
      groups: number of experts for a routed-expert projection, else 1.
      kind: what the projection is. "expert" weights have one matrix per group.
      interleaved: whether adapters have gate and up in turn where they are one, and the weight as
        [groups, in, out] (gpt-oss).
    """

    name: str
    in_features: int
    out_features: int
    groups: int = 1
    kind: Literal["linear", "expert", "router", "embedding", "head"] = "linear"
    interleaved: bool = False
