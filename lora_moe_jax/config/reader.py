"""Reads a Hugging Face `config.json` into a `ModelConfig`.

The spellings of transformers 4 (and of the hub) and of transformers 5 are both read. Whatever
would change the model and is not supported is refused; fields that change nothing are ignored.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from lora_moe_jax.config.defaults import DEFAULTS
from lora_moe_jax.config.fields import Fields
from lora_moe_jax.config.model import MlaConfig, ModelConfig, MoeConfig, RopeConfig
from lora_moe_jax.errors import ConfigError
from lora_moe_jax.strict_json import read_json_object

# model_type -> the family that implements it
FAMILIES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "gpt_oss": "gpt_oss",
}
FP8_BLOCK = 128  # rows, and columns, of a weight in 8 bits that share a scale
MAX_LAYERS = 4096
MAX_EXPERTS = 65536
ROPE_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
SCALED_ROPE_KEYS = ROPE_KEYS | {"factor", "original_max_position_embeddings"}
YARN_KEYS = SCALED_ROPE_KEYS | {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


def read_config(folder: str | os.PathLike) -> ModelConfig:
    """Reads `folder`/config.json, or the configuration file itself if a file is named.

    The end-of-sequence ids are those of a `generation_config.json` beside it, if it names some,
    as for generation in transformers.

    Raises:
      ConfigError: a file is missing or damaged, a required field is missing or has a wrong type
        or value, or the model needs something that is not supported.
    """
    path = Path(folder)
    if not os.path.exists(path):
        raise ConfigError(
            "there is no such model folder",
            file=path,
            expected="a folder with config.json, tokenizer and safetensors files",
            hint="models are not downloaded: fetch it first (`hf download`), and pass its folder",
        )
    file = path / "config.json" if path.is_dir() else path
    _check_is_there(file)
    values = read_json_object(file, ConfigError)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise Fields(values, file, {}).error(
            "the model type is not supported", "model_type", " or ".join(FAMILIES)
        )
    fields = Fields(values, file, DEFAULTS[model_type])
    _check_quantization(fields, model_type)
    fields.only("hidden_act", "silu")
    read = {"qwen3": _read_qwen, "qwen3_moe": _read_qwen, "gpt_oss": _read_gpt_oss}
    config = read.get(FAMILIES[model_type], _read_deepseek)(fields, model_type)
    # With yarn a model goes on past the positions that it is said to have, as in vLLM.
    stretched = int(config.rope.factor * config.rope.original_max_position)
    return replace(config, max_position=max(config.max_position, stretched))


def _check_is_there(file: Path) -> None:
    """Raises ConfigError with a hint for folders that are often taken for a model's."""
    hints = {
        "snapshots": "this is the cache's folder of a model: pass one of those in snapshots",
        "adapter_config.json": "this is an adapter: pass the folder of its base model",
    }
    found = [hint for name, hint in hints.items() if (file.parent / name).exists()]
    if found and not file.exists():
        raise ConfigError(
            "this is no model folder", file=file.parent, expected="config.json", hint=found[0]
        )


def _check_quantization(fields: Fields, model_type: str) -> None:
    """Raises ConfigError for quantised weights of a format that is not read into others."""
    hint = "convert the weights to bfloat16 first, or use a checkpoint of this model that has them"
    fields.only("compression_config", None, hint=hint)
    if not fields.has("quantization_config"):
        return
    section = fields.section("quantization_config", {})
    method = "mxfp4" if model_type == "gpt_oss" else "fp8"
    if section.get("quant_method", repr(method)) != method:
        raise section.error("a value is not supported", "quant_method", repr(method), hint)
    if method == "fp8":
        section.only("fmt", "e4m3", hint=hint)
        if section.get("weight_block_size", "two sizes") != [FP8_BLOCK, FP8_BLOCK]:
            blocks = f"[{FP8_BLOCK}, {FP8_BLOCK}]"
            raise section.error("a value is not supported", "weight_block_size", blocks, hint)


def _read_qwen(fields: Fields, model_type: str) -> ModelConfig:
    common = _read_common(fields, model_type)
    num_layers = common["num_layers"]
    return ModelConfig(
        **common,
        **_read_heads(fields, common),
        windows=_read_qwen_windows(fields, model_type, num_layers),
        moe=_read_qwen_moe(fields, num_layers) if model_type == "qwen3_moe" else None,
    )


def _read_gpt_oss(fields: Fields, model_type: str) -> ModelConfig:
    common = _read_common(fields, model_type)
    num_layers = common["num_layers"]
    if not fields.has(fields.spelled("dtype", "torch_dtype")):
        common["dtype"] = "bfloat16"  # as the hub's files are, which do not say so
    if not fields.has(fields.spelled("rope_scaling", "rope_parameters")):
        raise fields.wrong("rope_scaling", "how positions beyond those of training are rotated")
    fields.only("attention_bias", True)
    fields.only("swiglu_limit", 7.0, 7)
    fields.only("swiglu_alpha", 1.702)
    return ModelConfig(
        **common,
        **_read_heads(fields, common),
        windows=_read_gpt_oss_windows(fields, num_layers),
        qk_norm=False,
        sinks=True,
        moe=_read_gpt_oss_moe(fields, num_layers, common["intermediate_size"]),
    )


def _read_heads(fields: Fields, common: dict[str, object]) -> dict[str, object]:
    """The heads of grouped-query attention, and how they are rotated."""
    num_heads = common["num_heads"]
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        expected = f"a divisor of num_attention_heads, {num_heads}"
        raise fields.error(
            "the query heads cannot share the key/value heads", "num_key_value_heads", expected
        )
    # Qwen3-MoE has no default of its own for head_dim.
    defaults = {"head_dim": common["hidden_size"] // num_heads} | fields.defaults
    head_dim = Fields(fields.values, fields.file, defaults).integer("head_dim")
    return {
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope": _read_rope(fields, "head_dim", head_dim, interleaved=False),
    }


def _read_deepseek(fields: Fields, model_type: str) -> ModelConfig:
    common = _read_common(fields, model_type)
    num_heads = common["num_heads"]
    # All heads share one latent, so there is no smaller number of key/value heads.
    fields.only("num_key_value_heads", num_heads)
    fields.only("mlp_bias", False)
    mla = MlaConfig(
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
    # DeepSeek-V2 always pairs neighbouring features; the flag came with V3.
    interleaved = model_type == "deepseek_v2" or fields.flag("rope_interleave")
    return ModelConfig(
        **common,
        num_kv_heads=num_heads,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        rope=_read_rope(fields, "qk_rope_head_dim", mla.qk_rope_head_dim, interleaved),
        mla=mla,
        moe=_read_deepseek_moe(fields, model_type, common["num_layers"]),
    )


def _read_common(fields: Fields, model_type: str) -> dict[str, object]:
    """The fields that every family reads alike."""
    dtype_key = fields.spelled("dtype", "torch_dtype")
    return {
        "family": FAMILIES[model_type],
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "num_layers": fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        "num_heads": fields.integer("num_attention_heads"),
        "intermediate_size": fields.integer("intermediate_size"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_position": fields.integer("max_position_embeddings"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "attention_bias": fields.flag("attention_bias"),
        "dtype": fields.only(dtype_key, "float32", "bfloat16", "float16"),
        "bos_token_id": fields.optional_integer("bos_token_id", minimum=0),
        "eos_token_ids": _read_eos(fields),
    }


def _read_eos(fields: Fields) -> tuple[int, ...]:
    generation = Path(fields.file).parent / "generation_config.json"
    if generation.exists():
        own = Fields(read_json_object(generation, ConfigError), generation, {})
        if own.has("eos_token_id"):
            fields = own
    if not isinstance(fields.get("eos_token_id", "token ids"), list):
        single = fields.optional_integer("eos_token_id", minimum=0)
        return () if single is None else (single,)
    ids = fields.items("eos_token_id", int)
    if any(not 0 <= item < 2**31 for item in ids):
        raise fields.wrong("eos_token_id", "token ids")
    return tuple(ids)


def _read_rope(fields: Fields, dim_key: str, dim: int, interleaved: bool) -> RopeConfig:
    if dim % 2:
        raise fields.error("rotary features come in pairs", dim_key, f"an even number, not {dim}")
    defaults = {
        "rope_theta": fields.number("rope_theta", 1.0),
        "original_max_position_embeddings": fields.integer("max_position_embeddings"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
        "truncate": True,
    }
    # Where a file has both spellings, transformers lets rope_scaling win.
    section = fields.section("rope_scaling", defaults)
    if not section.values:
        section = fields.section("rope_parameters", defaults)
    kind = section.only(section.spelled("rope_type", "type"), "default", "linear", "yarn")
    # No family rotates a part of its rotary features: transformers ignores the field for Qwen3
    # and DeepSeek, and fails in the forward pass for GLM-4.7-Flash.
    fields.only("partial_rotary_factor", 1.0, 1)
    section.only("partial_rotary_factor", 1.0, 1)
    known = YARN_KEYS if kind == "yarn" else SCALED_ROPE_KEYS
    for key in sorted(section.values.keys() - known):
        raise section.error(f"{kind!r} rope has no such option", key, ", ".join(sorted(known)))
    theta = section.number("rope_theta", 1.0)
    if kind == "default":
        return RopeConfig(dim=dim, theta=theta, interleaved=interleaved)
    factor = section.number("factor", 1.0, inclusive=True)
    if kind == "linear":
        return RopeConfig(dim, theta, kind, interleaved, factor)
    return RopeConfig(
        dim=dim,
        theta=theta,
        kind=kind,
        interleaved=interleaved,
        factor=factor,
        original_max_position=section.integer("original_max_position_embeddings"),
        beta_fast=section.number("beta_fast"),
        beta_slow=section.number("beta_slow"),
        mscale=section.number("mscale", inclusive=True),
        mscale_all_dim=section.number("mscale_all_dim", inclusive=True),
        attention_factor=(
            section.number("attention_factor") if section.has("attention_factor") else None
        ),
        truncate=section.flag("truncate"),
    )


def _read_qwen_windows(fields: Fields, model_type: str, num_layers: int) -> tuple:
    window, full = None, 0
    if fields.flag("use_sliding_window"):
        window = fields.optional_integer("sliding_window")
    if model_type == "qwen3":
        if fields.has("layer_types"):
            return _windows(fields, window, num_layers)
        full = fields.integer("max_window_layers", minimum=0)
    if window is None or full >= num_layers:
        return ()
    return tuple(None if layer < full else window for layer in range(num_layers))


def _read_gpt_oss_windows(fields: Fields, num_layers: int) -> tuple:
    window = fields.optional_integer("sliding_window")
    if fields.has("layer_types"):
        return _windows(fields, window, num_layers)
    if window is None:
        return ()
    return tuple(None if layer % 2 else window for layer in range(num_layers))


def _windows(fields: Fields, window: int | None, num_layers: int) -> tuple:
    """The window of each layer by its type; empty if none has one."""
    types = fields.items("layer_types", str, num_layers)
    if set(types) == {"full_attention"}:
        return ()
    if window is None or not set(types) <= {"full_attention", "sliding_attention"}:
        raise fields.error(
            "a layer's attention is not supported, or there is no window",
            "layer_types",
            "'full_attention', or 'sliding_attention' of a sliding_window that is used",
        )
    return tuple(window if name == "sliding_attention" else None for name in types)


def _read_qwen_moe(fields: Fields, num_layers: int) -> MoeConfig:
    step = fields.integer("decoder_sparse_step")
    dense = fields.items("mlp_only_layers", int) if fields.has("mlp_only_layers") else []
    num_experts, top_k = _read_experts(fields, fields.spelled("num_experts", "num_local_experts"))
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        expert_size=fields.integer("moe_intermediate_size"),
        shared_size=0,
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        scoring="softmax",
        correction_bias=False,
        n_group=1,
        topk_group=1,
        group_score="none",
        norm_topk_prob=fields.flag("norm_topk_prob"),
        routed_scaling_factor=1.0,
        router_float32=False,
    )


def _read_gpt_oss_moe(fields: Fields, num_layers: int, expert_size: int) -> MoeConfig:
    key = fields.spelled("num_experts_per_tok", "experts_per_token")
    num_experts, top_k = _read_experts(
        fields, fields.spelled("num_local_experts", "num_experts"), key
    )
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        expert_size=expert_size,
        shared_size=0,
        sparse_layers=(True,) * num_layers,
        scoring="softmax",
        correction_bias=False,
        n_group=1,
        topk_group=1,
        group_score="none",
        # A softmax over the chosen experts alone is that of all, normalised.
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        router_float32=False,
        router="router",
        bias=True,
        interleaved=True,
    )


def _read_deepseek_moe(fields: Fields, model_type: str, num_layers: int) -> MoeConfig:
    v2 = model_type == "deepseek_v2"
    fields.only("moe_layer_freq", 1)
    fields.only("scoring_func", "softmax" if v2 else "sigmoid")
    methods = ("greedy", "group_limited_greedy") if v2 else ("noaux_tc",)
    method = fields.only("topk_method", *methods)
    num_experts, top_k = _read_experts(
        fields, fields.spelled("n_routed_experts", "num_local_experts", "num_experts")
    )
    n_group = topk_group = 1
    if method != "greedy":
        n_group, topk_group = _read_groups(fields, num_experts, top_k)
    if method == "noaux_tc" and n_group > 1 and num_experts < 2 * n_group:
        expected = f"at most {num_experts // 2}: groups are scored by their best two experts"
        raise fields.error("the groups are too small", "n_group", expected)
    expert_size = fields.integer("moe_intermediate_size")
    group_score = "max" if v2 else "top2_sum"
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        expert_size=expert_size,
        shared_size=(fields.optional_integer("n_shared_experts", minimum=0) or 0) * expert_size,
        sparse_layers=_read_sparse_layers(fields, model_type, num_layers),
        scoring="softmax" if v2 else "sigmoid",
        correction_bias=not v2,
        n_group=n_group,
        topk_group=topk_group,
        group_score="none" if n_group == 1 else group_score,
        # transformers never normalises in DeepSeek-V2, whatever the field says.
        norm_topk_prob=not v2 and fields.flag("norm_topk_prob"),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        router_float32=True,
    )


def _read_experts(
    fields: Fields, key: str, top_k_key: str = "num_experts_per_tok"
) -> tuple[int, int]:
    num_experts = fields.integer(key, maximum=MAX_EXPERTS)
    top_k = fields.integer(top_k_key)
    if top_k > num_experts:
        raise fields.error("there are fewer experts", top_k_key, f"at most {key}, {num_experts}")
    return num_experts, top_k


def _read_groups(fields: Fields, num_experts: int, top_k: int) -> tuple[int, int]:
    n_group, topk_group = fields.integer("n_group"), fields.integer("topk_group")
    if num_experts % n_group:
        expected = f"a divisor of the number of experts, {num_experts}"
        raise fields.error("the experts do not fill the groups", "n_group", expected)
    if topk_group > n_group:
        raise fields.error("there are fewer groups", "topk_group", f"at most n_group, {n_group}")
    eligible = topk_group * (num_experts // n_group)
    if top_k > eligible:
        expected = f"at most {eligible}, the experts of topk_group groups"
        raise fields.error("there are fewer experts", "num_experts_per_tok", expected)
    return n_group, topk_group


def _read_sparse_layers(fields: Fields, model_type: str, num_layers: int) -> tuple[bool, ...]:
    first = fields.integer("first_k_dense_replace", minimum=0)
    by_count = tuple(i >= first for i in range(num_layers))
    if model_type != "glm4_moe_lite" or not fields.has("mlp_layer_types"):
        return by_count
    types = fields.items("mlp_layer_types", str, num_layers)
    if not set(types) <= {"dense", "sparse"}:
        raise fields.wrong("mlp_layer_types", "'dense' or 'sparse' for each layer")
    by_name = tuple(name == "sparse" for name in types)
    if "first_k_dense_replace" in fields.values and by_name != by_count:
        expected = "the number of leading 'dense' layers in mlp_layer_types, and no others"
        raise fields.error("the dense layers are in doubt", "first_k_dense_replace", expected)
    return by_name
