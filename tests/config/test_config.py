from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lora_moe_jax.config.model import MlaConfig, ModelConfig, RopeConfig
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.config.writer import to_json_dict
from lora_moe_jax.errors import ConfigError
from tests.config.hub_configs import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DEEPSEEK_V3_QUANTIZATION,
    GLM_4_7_FLASH,
    GPT_OSS_20B,
    HUB_CONFIGS,
    QWEN3_30B_A3B,
)

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ["qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MIXED_LAYERS = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def read(folder: Path, values: dict | str | bytes) -> ModelConfig:
    if isinstance(values, dict):
        values = json.dumps(values)
    if isinstance(values, str):
        values = values.encode()
    (folder / "config.json").write_bytes(values)
    return read_config(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_spellings_agree(family):
    base = GOLDEN / family / "base"
    config = ModelConfig.from_json(base)
    assert config.family == family
    assert config == ModelConfig.from_json(base / "config_v4.json")
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (3, 64, 256)
    assert config.dtype == "float32"


def test_golden_contents():
    config = ModelConfig.from_json(GOLDEN / "deepseek_v2/base")
    assert config.moe.sparse_layers == (False, True, True)
    assert (config.moe.group_score, config.moe.n_group, config.moe.topk_group) == ("max", 2, 1)
    assert (config.moe.scoring, config.moe.shared_size) == ("softmax", 48)
    assert config.mla == MlaConfig(None, 16, 16, 8, 12)
    assert config.rope == RopeConfig(8, 1e4, "yarn", True, 4.0, 32, 32, 1, 0.707, 0.9)
    config = ModelConfig.from_json(GOLDEN / "qwen3_moe/base")
    assert config.moe.sparse_layers == (True, False, True)
    assert config.rope == RopeConfig(32, 1e4)
    config = ModelConfig.from_json(GOLDEN / "deepseek_v3/base")
    assert (config.moe.group_score, config.moe.scoring) == ("top2_sum", "sigmoid")
    assert (config.bos_token_id, config.eos_token_ids, config.head_dim) == (0, (1,), 24)


HUB_FACTS = {
    "qwen3-30b-a3b": dict(
        family="qwen3_moe", num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, dense=0,
        experts=(128, 8, 768, 0), group="none", scale=1.0, theta=1e6, eos=(151645,),
    ),
    "qwen3-235b-a22b": dict(
        family="qwen3_moe", num_layers=94, num_heads=64, num_kv_heads=4, head_dim=128, dense=0,
        experts=(128, 8, 1536, 0), group="none", scale=1.0, theta=1e6, eos=(151645,),
    ),
    "deepseek-v2-lite": dict(
        family="deepseek_v2", num_layers=27, num_heads=16, num_kv_heads=16, head_dim=192, dense=1,
        experts=(64, 6, 1408, 2816), group="none", scale=1.0, theta=1e4, eos=(100001,),
    ),
    "deepseek-v3": dict(
        family="deepseek_v3", num_layers=61, num_heads=128, num_kv_heads=128, head_dim=192,
        dense=3, experts=(256, 8, 2048, 2048), group="top2_sum", scale=2.5, theta=1e4, eos=(1,),
    ),
    "kimi-k2": dict(
        family="deepseek_v3", num_layers=61, num_heads=64, num_kv_heads=64, head_dim=192, dense=1,
        experts=(384, 8, 2048, 2048), group="none", scale=2.827, theta=5e4, eos=(163585,),
    ),
    "glm-4.7-flash": dict(
        family="deepseek_v3", num_layers=47, num_heads=20, num_kv_heads=20, head_dim=256, dense=1,
        experts=(64, 4, 1536, 1536), group="none", scale=1.8, theta=1e6,
        eos=(154820, 154827, 154829),
    ),
    "gpt-oss-20b": dict(
        family="gpt_oss", num_layers=24, num_heads=64, num_kv_heads=8, head_dim=64, dense=0,
        experts=(32, 4, 2880, 0), group="none", scale=1.0, theta=150000.0, eos=(200002,),
    ),
    "gpt-oss-120b": dict(
        family="gpt_oss", num_layers=36, num_heads=64, num_kv_heads=8, head_dim=64, dense=0,
        experts=(128, 4, 2880, 0), group="none", scale=1.0, theta=150000.0, eos=(200002,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_hub_configs(tmp_path, name):
    facts = HUB_FACTS[name]
    config = read(tmp_path, HUB_CONFIGS[name])
    for key in ("family", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(config, key) == facts[key], key
    moe = config.moe
    assert (moe.num_experts, moe.top_k, moe.expert_size, moe.shared_size) == facts["experts"]
    assert moe.sparse_layers == tuple(i >= facts["dense"] for i in range(config.num_layers))
    assert (moe.group_score, moe.routed_scaling_factor) == (facts["group"], facts["scale"])
    assert (config.rope.theta, config.eos_token_ids) == (facts["theta"], facts["eos"])
    assert config.dtype == "bfloat16"
    assert moe.router_float32 is (config.mla is not None)
    assert config.rope.interleaved is (config.mla is not None)


@pytest.mark.parametrize(
    "values",
    [
        *HUB_CONFIGS.values(),
        QWEN3 | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0},
        QWEN3 | {"rope_scaling": {"type": "linear", "factor": 2}},
        QWEN3 | {"rope_scaling": YARN | {"attention_factor": 1.25, "truncate": False}},
        QWEN3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [5]},
        DEEPSEEK_V2_LITE
        | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "q_lora_rank": 64},
        DEEPSEEK_V3 | {"rope_interleave": False, "n_shared_experts": None, "bos_token_id": None},
        GLM_4_7_FLASH
        | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]}
        | {"first_k_dense_replace": None},
        QWEN3 | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
        QWEN3 | MIXED_LAYERS,
        GPT_OSS_20B | {"sliding_window": 64, "layer_types": ["full_attention"] * 24},
        GPT_OSS_20B | {"rope_scaling": {"rope_type": "default"}},
    ],
)
def test_written_config_reads_back_equal(tmp_path, values):
    values = {k: v for k, v in values.items() if k != "first_k_dense_replace" or v}
    config = read(tmp_path, values)
    assert read(tmp_path, to_json_dict(config)) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_written_golden_config_reads_back_equal(tmp_path, family):
    config = ModelConfig.from_json(GOLDEN / family / "base")
    assert read(tmp_path, to_json_dict(config)) == config


def test_defaults_are_those_of_the_model_classes(tmp_path):
    config = read(tmp_path, QWEN3)
    assert (config.head_dim, config.rms_norm_eps, config.rope.theta) == (128, 1e-6, 1e4)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (False, ())
    values = {key: value for key, value in QWEN3_30B_A3B.items() if key != "head_dim"}
    assert read(tmp_path, values).head_dim == 64
    values = {key: DEEPSEEK_V3[key] for key in DEEPSEEK_V3 if "eos" not in key and "bos" not in key}
    assert read(tmp_path, values).eos_token_ids == (1,)
    assert read(tmp_path, DEEPSEEK_V3 | {"eos_token_id": None}).eos_token_ids == ()


def test_yarn_takes_the_original_length_from_the_model(tmp_path):
    scaling = {"type": "yarn", "factor": 2.0, "beta_fast": None}
    rope = read(tmp_path, QWEN3 | {"rope_scaling": scaling}).rope
    assert (rope.original_max_position, rope.beta_fast, rope.mscale) == (512, 32.0, 0.0)


def test_blocks_of_8_bits_are_read_into_others(tmp_path):
    """So the configuration is that of other weights."""
    quantized = DEEPSEEK_V3 | {"quantization_config": DEEPSEEK_V3_QUANTIZATION}
    assert read(tmp_path, quantized) == read(tmp_path, DEEPSEEK_V3)


def test_yarn_goes_on_past_the_positions_of_the_model(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 300}
    assert read(tmp_path, QWEN3).max_position == 512
    assert read(tmp_path, QWEN3 | {"rope_scaling": scaling}).max_position == 1200
    scaling["factor"] = 1.5
    assert read(tmp_path, QWEN3 | {"rope_scaling": scaling}).max_position == 512


@pytest.mark.parametrize(
    ("inside", "hint"), [("snapshots", "snapshots"), ("adapter_config.json", "an adapter")]
)
def test_folders_that_are_taken_for_a_models(tmp_path, inside, hint):
    (tmp_path / inside).mkdir()
    with pytest.raises(ConfigError, match=hint) as caught:
        read_config(tmp_path)
    assert caught.value.file == str(tmp_path)
    read(tmp_path, QWEN3)  # with a config.json it is one


def test_theta_of_rope_parameters_wins(tmp_path):
    values = QWEN3 | {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}
    assert read(tmp_path, values).rope.theta == 5e5
    values["rope_parameters"]["rope_theta"] = 7e5
    assert read(tmp_path, values).rope.theta == 7e5


def test_generation_config_names_the_end_tokens(tmp_path):
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [7, 9]}')
    assert read(tmp_path, QWEN3 | {"eos_token_id": 3}).eos_token_ids == (7, 9)
    generation.write_text('{"eos_token_id": null}')
    assert read(tmp_path, QWEN3 | {"eos_token_id": 3}).eos_token_ids == (3,)
    generation.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, QWEN3)
    assert caught.value.file == str(generation) and caught.value.key == "eos_token_id"


def test_sliding_window(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 64}
    assert read(tmp_path, QWEN3 | window | {"max_window_layers": 4}).windows == ()
    assert read(tmp_path, QWEN3 | window | {"max_window_layers": 0}).windows == (64,) * 4
    mixed = read(tmp_path, QWEN3 | window | {"max_window_layers": 3})
    assert mixed.windows == (None, None, None, 64)
    assert [mixed.window(i) for i in (2, 3)] == [None, 64]
    assert mixed.first_layers(2).windows == (None, None)
    types = {"layer_types": ["sliding_attention"] * 4}
    assert read(tmp_path, QWEN3 | window | types).windows == (64,) * 4
    assert read(tmp_path, QWEN3 | MIXED_LAYERS).windows == (8, None, None, 8)
    assert read(tmp_path, QWEN3_30B_A3B | window).windows == (64,) * 48
    assert read(tmp_path, QWEN3_30B_A3B).window(3) is None


def test_gpt_oss(tmp_path):
    """The hub's file, another spelling of it, and what it means where it says nothing."""
    config = read(tmp_path, GPT_OSS_20B)
    assert config.windows == (128, None) * 12 and config.first_layers(3).windows == (128, None, 128)
    assert config.sinks and config.attention_bias and not config.qk_norm
    assert (config.moe.router, config.moe.bias, config.moe.interleaved) == ("router", True, True)
    assert config.moe.norm_topk_prob and not config.rope.truncate
    rope = GPT_OSS_20B["rope_scaling"] | {"rope_theta": 150000}
    silent = "layer_types", "sliding_window", "head_dim", "num_key_value_heads", "attention_bias"
    spelt = "rope_scaling", "rope_theta", "num_experts_per_tok", "quantization_config"
    other = {key: value for key, value in GPT_OSS_20B.items() if key not in (*silent, *spelt)}
    more = {"rope_parameters": rope, "dtype": "bfloat16", "swiglu_alpha": 1.702}
    assert read(tmp_path, other | more) == config


def test_config_is_immutable(tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        read(tmp_path, QWEN3).num_layers = 1


V2 = DEEPSEEK_V2_LITE
V3 = DEEPSEEK_V3
MOE = QWEN3_30B_A3B
GPT_OSS = GPT_OSS_20B
ABSENT = object()
# what is changed in which configuration, and the key that the refusal names
BAD = {
    "unknown model type": (QWEN3, {"model_type": "llama"}, "model_type"),
    "no model type": (QWEN3, {"model_type": ABSENT}, "model_type"),
    "model type is a list": (QWEN3, {"model_type": ["qwen3"]}, "model_type"),
    "activation": (QWEN3, {"hidden_act": "gelu"}, "hidden_act"),
    "quantized otherwise": (
        V3, {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method",
    ),
    "other 8 bits": (
        V3, {"quantization_config": DEEPSEEK_V3_QUANTIZATION | {"fmt": "e5m2"}},
        "quantization_config.fmt",
    ),
    "other blocks": (
        MOE, {"quantization_config": DEEPSEEK_V3_QUANTIZATION | {"weight_block_size": [64, 64]}},
        "quantization_config.weight_block_size",
    ),
    "no blocks": (
        MOE, {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config.weight_block_size",
    ),
    "compressed": (MOE, {"compression_config": {}}, "compression_config"),
    "no hidden size": (QWEN3, {"hidden_size": ABSENT}, "hidden_size"),
    "no vocabulary": (MOE, {"vocab_size": ABSENT}, "vocab_size"),
    "no experts": (MOE, {"num_experts": ABSENT}, "num_experts"),
    "null experts": (V3, {"n_routed_experts": None}, "n_routed_experts"),
    "no latent": (V3, {"kv_lora_rank": ABSENT}, "kv_lora_rank"),
    "no query latent": (V3, {"q_lora_rank": ABSENT}, "q_lora_rank"),
    "hidden size is text": (QWEN3, {"hidden_size": "64"}, "hidden_size"),
    "hidden size is a fraction": (QWEN3, {"hidden_size": 64.5}, "hidden_size"),
    "layers is a flag": (QWEN3, {"num_hidden_layers": True}, "num_hidden_layers"),
    "no layers": (QWEN3, {"num_hidden_layers": 0}, "num_hidden_layers"),
    "absurdly many layers": (QWEN3, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "huge integer": (QWEN3, {"vocab_size": 10**400}, "vocab_size"),
    "negative size": (QWEN3, {"intermediate_size": -96}, "intermediate_size"),
    "odd head": (QWEN3, {"head_dim": 33}, "head_dim"),
    "null head": (QWEN3, {"head_dim": None}, "head_dim"),
    "more heads than features": (MOE, {"head_dim": ABSENT, "hidden_size": 8}, "head_dim"),
    "odd rope part": (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    "heads do not divide": (QWEN3, {"num_key_value_heads": 3}, "num_key_value_heads"),
    "grouped latent heads": (V3, {"num_key_value_heads": 8}, "num_key_value_heads"),
    "top-k": (MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
    "top-k beyond groups": (V3, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
    "groups do not divide": (V3, {"n_group": 7}, "n_group"),
    "groups of one": (V3, {"n_group": 256, "topk_group": 8}, "n_group"),
    "groups kept": (V3, {"topk_group": 9}, "topk_group"),
    "no groups": (
        V2, {"topk_method": "group_limited_greedy", "n_group": ABSENT}, "n_group",
    ),
    "v2 method": (V2, {"topk_method": "noaux_tc"}, "topk_method"),
    "v3 method": (V3, {"topk_method": "greedy"}, "topk_method"),
    "scoring": (V3, {"scoring_func": "softmax"}, "scoring_func"),
    "layer frequency": (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
    "biases in the MLP": (V2, {"mlp_bias": True}, "mlp_bias"),
    "dtype": (QWEN3, {"dtype": "float64"}, "dtype"),
    "v4 dtype": (QWEN3, {"torch_dtype": "int8"}, "torch_dtype"),
    "two dtypes": (QWEN3, {"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype"),
    "two expert counts": (MOE, {"num_local_experts": 64}, "num_experts"),
    "eps is zero": (QWEN3, {"rms_norm_eps": 0}, "rms_norm_eps"),
    "flag is a number": (QWEN3, {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    "end token": (QWEN3, {"eos_token_id": -1}, "eos_token_id"),
    "end tokens": (QWEN3, {"eos_token_id": [1, True]}, "eos_token_id"),
    "rope type": (QWEN3, {"rope_scaling": {"type": "llama3", "factor": 2}}, "rope_scaling.type"),
    "v5 rope type": (
        QWEN3, {"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type",
    ),
    "rope is a list": (QWEN3, {"rope_scaling": [1]}, "rope_scaling"),
    "rope per layer type": (
        QWEN3, {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention",
    ),
    "no factor": (QWEN3, {"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor"),
    "factor below one": (
        QWEN3, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor",
    ),
    "theta": (QWEN3, {"rope_theta": 1.0}, "rope_theta"),
    "attention factor": (
        QWEN3, {"rope_scaling": YARN | {"attention_factor": -1.0}}, "rope_scaling.attention_factor",
    ),
    "mscale without yarn": (
        V3,
        {"rope_scaling": {"type": "linear", "factor": 2, "mscale_all_dim": 1}},
        "rope_scaling.mscale_all_dim",
    ),
    "partial rotation": (
        GLM_4_7_FLASH, {"partial_rotary_factor": 0.5}, "partial_rotary_factor",
    ),
    "layer type": (QWEN3, {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    "windows without a width": (QWEN3, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "no gpt-oss window": (GPT_OSS, {"sliding_window": None}, "layer_types"),
    "gpt-oss layer types": (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types"),
    "no gpt-oss rope": (GPT_OSS, {"rope_scaling": None}, "rope_scaling"),
    "no attention biases": (GPT_OSS, {"attention_bias": False}, "attention_bias"),
    "another limit": (GPT_OSS, {"swiglu_limit": 10.0}, "swiglu_limit"),
    "another alpha": (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha"),
    "gpt-oss quantized otherwise": (
        GPT_OSS,
        {"quantization_config": DEEPSEEK_V3_QUANTIZATION},
        "quantization_config.quant_method",
    ),
    "no method": (GPT_OSS, {"quantization_config": {}}, "quantization_config.quant_method"),
    "4 bits of another family": (
        MOE, {"quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config.quant_method",
    ),
    "two numbers of choices": (GPT_OSS, {"experts_per_token": 8}, "num_experts_per_tok"),
    "no gpt-oss experts": (GPT_OSS, {"num_local_experts": ABSENT}, "num_local_experts"),
    "gpt-oss top-k": (
        GPT_OSS,
        {"num_experts_per_tok": 33, "experts_per_token": 33},
        "num_experts_per_tok",
    ),
    "too few layer types": (QWEN3, {"layer_types": ["full_attention"]}, "layer_types"),
    "MLP layer type": (
        GLM_4_7_FLASH, {"mlp_layer_types": ["dense"] + ["moe"] * 46}, "mlp_layer_types",
    ),
    "dense layers in doubt": (
        GLM_4_7_FLASH, {"mlp_layer_types": ["sparse"] * 47}, "first_k_dense_replace",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_are_refused_by_name(tmp_path, name):
    values, change, key = BAD[name]
    values = {k: v for k, v in (values | change).items() if v is not ABSENT}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, values)
    assert caught.value.key == key
    assert caught.value.file == str(tmp_path / "config.json")
    assert caught.value.expected is not None and caught.value.found is not None


def test_unknown_model_type_says_which_are_supported(tmp_path):
    with pytest.raises(ConfigError, match="qwen3_moe.*kimi_k2.*glm4_moe_lite"):
        read(tmp_path, QWEN3 | {"model_type": "mixtral"})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"model_type": "qwen3"',
        b"\xff\xfe{}",
        b'{"vocab_size": NaN}',
        b'{"vocab_size": ' + b"9" * 5000 + b"}",
        b'{"model_type": "qwen3", "model_type": "qwen3_moe"}',
        b'{"a":' * 100_000,
    ],
)
def test_damaged_files_are_refused(tmp_path, content):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    assert caught.value.file == str(tmp_path / "config.json")


@pytest.mark.parametrize("path", ["absent", "a\0b"])
def test_missing_files_are_refused(tmp_path, path):
    with pytest.raises(ConfigError):
        ModelConfig.from_json(tmp_path / path)
    with pytest.raises(ConfigError, match="config.json"):
        ModelConfig.from_json(tmp_path)
