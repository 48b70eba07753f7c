"""What an absent field of a `config.json` means: the defaults of transformers' model classes.

Sizes are left out on purpose. A configuration without them is damaged, and the default sizes of
the class would be those of another model.
"""

from __future__ import annotations

_COMMON = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10000.0,
}
_QWEN = _COMMON | {
    "bos_token_id": None,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_DEEPSEEK_V3 = _COMMON | {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_interleave": True,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
DEFAULTS: dict[str, dict[str, object]] = {
    "qwen3": _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": _QWEN | {"num_key_value_heads": 4},
    "deepseek_v2": _COMMON
    | {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3
    | {
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    },
    "gpt_oss": _COMMON
    | {
        "bos_token_id": None,
        "eos_token_id": None,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
