"""Writes a `ModelConfig` as the `config.json` of a Hugging Face model."""

from __future__ import annotations

from lora_moe_jax.config.model import ModelConfig, MoeConfig, RopeConfig

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def to_json_dict(config: ModelConfig) -> dict[str, object]:
    """The fields of a `config.json` that `read_config` reads back as an equal `config`.

    The spellings are those of the hub, which transformers 4 and 5 both read.
    """
    model_type = _model_type(config)
    eos = config.eos_token_ids
    values: dict[str, object] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
    }
    values |= _gqa_values(config) if config.mla is None else _mla_values(config)
    if model_type == "gpt_oss":
        # This family says so itself where positions are not scaled: its default is that they are.
        scaling = values["rope_scaling"] or {"rope_type": "default"}
        return values | _gpt_oss_values(config.moe) | {"rope_scaling": scaling}
    if config.moe is not None:
        values |= _moe_values(config.moe, model_type)
    return values


def _model_type(config: ModelConfig) -> str:
    """The family, but GLM-4.7-Flash where dense layers follow sparse ones: only it can say so."""
    if config.family == "deepseek_v3" and config.moe is not None:
        sparse = config.moe.sparse_layers
        if sparse != tuple(sorted(sparse)):
            return "glm4_moe_lite"
    return config.family


def _rope_scaling(rope: RopeConfig) -> dict[str, object] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, object] = {"type": rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return scaling
    scaling |= {
        "original_max_position_embeddings": rope.original_max_position,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": rope.truncate,
    }
    optional = {
        "mscale": rope.mscale or None,
        "mscale_all_dim": rope.mscale_all_dim or None,
        "attention_factor": rope.attention_factor,
    }
    return scaling | {key: value for key, value in optional.items() if value is not None}


def _gqa_values(config: ModelConfig) -> dict[str, object]:
    windows = config.windows or (None,) * config.num_layers
    widths = [window for window in windows if window is not None]
    return {
        "head_dim": config.head_dim,
        "use_sliding_window": bool(widths),
        "sliding_window": widths[0] if widths else None,
        "max_window_layers": config.num_layers - len(widths),
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in windows
        ],
    }


def _gpt_oss_values(moe: MoeConfig) -> dict[str, object]:
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "swiglu_limit": 7.0,
    }


def _mla_values(config: ModelConfig) -> dict[str, object]:
    mla = config.mla
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_interleave": config.rope.interleaved,
    }


def _moe_values(moe: MoeConfig, model_type: str) -> dict[str, object]:
    sparse = moe.sparse_layers
    values: dict[str, object] = {
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "norm_topk_prob": moe.norm_topk_prob,
    }
    if model_type == "qwen3_moe":
        return values | {
            "num_experts": moe.num_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, routed in enumerate(sparse) if not routed],
        }
    values |= {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_size // moe.expert_size,
        "n_group": moe.n_group,
        "topk_group": moe.topk_group,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "scoring_func": moe.scoring,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }
    if model_type == "deepseek_v2":
        values["topk_method"] = "group_limited_greedy" if moe.n_group > 1 else "greedy"
    if model_type == "glm4_moe_lite":
        return values | {"mlp_layer_types": ["sparse" if s else "dense" for s in sparse]}
    return values | {"first_k_dense_replace": len(sparse) - sum(sparse)}
