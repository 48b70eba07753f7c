"""What a model is: the sizes and options that its family needs, read from `config.json`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `dim` is the number of rotated features of a head.

    `interleaved` pairs features (2j, 2j+1); otherwise (j, j + dim/2).
    `factor` and the fields after it belong to `kind="yarn"` (or `factor` to "linear").
    """

    dim: int
    theta: float
    kind: Literal["default", "linear", "yarn"] = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention. `q_lora_rank` is None when queries are one plain product."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts.

    Attributes:
      shared_size: total width of the shared experts, 0 if there are none.
      sparse_layers: for each layer, whether its MLP is routed.
      scoring: "softmax" (Qwen3, DeepSeek-V2) or "sigmoid" (DeepSeek-V3).
      correction_bias: whether a bias is added to the scores for the choice only.
      group_score: how an expert group is scored before `topk_group` of `n_group` are kept;
        "none" when groups are not used.
      router_float32: whether the router's product and weights are float32 (DeepSeek) or in the
        activations' dtype (Qwen3).
      router: what checkpoints and adapters call the router.
      bias: whether the router and the experts have biases.
      interleaved: whether files have the experts of a layer as [expert, in, out], with gate and up
        in turn (gpt-oss).
    """

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int
    sparse_layers: tuple[bool, ...]
    scoring: Literal["softmax", "sigmoid"]
    correction_bias: bool
    n_group: int
    topk_group: int
    group_score: Literal["none", "max", "top2_sum"]
    norm_topk_prob: bool
    routed_scaling_factor: float
    router_float32: bool
    router: str = "gate"
    bias: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """One model. `mla` is None for grouped-query attention, `moe` is None for a dense model.

    `head_dim` is the width of a query head; with `mla` that is its two parts together.

    Attributes:
      windows: how many positions each layer attends to, its own included; None for all. Empty if
        all layers attend to all.
      qk_norm: whether grouped-query attention norms each head's queries and keys.
      sinks: whether each head has a score that no position has.
    """

    family: Literal["qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    windows: tuple[int | None, ...] = ()
    qk_norm: bool = True
    sinks: bool = False
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is routed."""
        return self.moe is not None and self.moe.sparse_layers[layer]

    def window(self, layer: int) -> int | None:
        """How many positions a layer attends to; None for all."""
        return self.windows[layer] if self.windows else None

    def kind(self, layer: int) -> tuple[bool, int | None]:
        """What layers differ in besides their weights."""
        return self.is_sparse(layer), self.window(layer)

    def first_layers(self, count: int) -> ModelConfig:
        """The model without its later layers, for benchmarks."""
        count = min(count, self.num_layers)
        moe = self.moe and replace(self.moe, sparse_layers=self.moe.sparse_layers[:count])
        return replace(self, num_layers=count, moe=moe, windows=self.windows[:count])

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> ModelConfig:
        """Reads a `config.json`, or that of a model folder; see `config.reader.read_config`."""
        from lora_moe_jax.config.reader import read_config  # it builds these classes

        return read_config(path)
