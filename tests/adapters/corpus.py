"""Bad adapters: each is a good golden adapter broken in one way.

    for name, break_it in CORPUS.items():
        break_it(folder)          # fills the folder, which may exist, with the broken adapter

All are for the deepseek_v3 golden base, and none may be loaded by an engine of max_rank 16.
`break_it.key` is part of the key that the error must name ("" if it is about a whole file), and
`break_it.says` are words that must be in its message.
"""

from __future__ import annotations

import json
import shutil
import struct

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.adapters.breaking import (
    CONFIG,
    CORPUS,
    TENSORS,
    bad,
    bad_config,
    bad_header,
    bad_tensors,
    bad_text,
)
from tests.adapters.tables import GOLDEN

__all__ = ["CORPUS", "MAX_RANK"]

MAX_RANK = 16
P = "base_model.model."
L1 = "base_model.model.model.layers.1"
O_PROJ = f"{L1}.self_attn.o_proj"
EXPERTS = f"{L1}.mlp.experts"


# ---- the folder ----------------------------------------------------------------------------------
@bad(says=(CONFIG,))
def no_config(folder):
    (folder / CONFIG).unlink()


@bad(says=(TENSORS,))
def no_tensor_file(folder):
    (folder / TENSORS).unlink()


@bad(says=("adapter_model.bin", "pickle"))
def pickle_only(folder):
    (folder / TENSORS).rename(folder / "adapter_model.bin")


@bad(says=("sub-folder", "poet"))
def saved_in_a_sub_folder(folder):
    (folder / "poet").mkdir(exist_ok=True)
    (folder / CONFIG).rename(folder / "poet" / CONFIG)
    (folder / TENSORS).rename(folder / "poet" / TENSORS)


@bad(says=("cannot be read",))
def tensor_file_is_a_folder(folder):
    (folder / TENSORS).unlink()
    (folder / TENSORS).mkdir()


# ---- the config as a file ------------------------------------------------------------------------
bad_text("config_empty", "", says=("not valid JSON",))
bad_text("config_truncated", '{"peft_type": "LORA", "r": 4, "targ', says=("not valid JSON",))
bad_text("config_is_a_list", "[1, 2]", says=("not a JSON object", "list"))
bad_text("config_not_utf8", b'{"r": "\xff\xfe"}', says=("UTF-8",))
bad_text("config_nested_deeply", '{"r":' + "[" * 200_000, says=("not valid JSON",))
bad_text("config_key_twice", '{"r": 4, "r": 8}', key="r", says=("twice",))
bad_text("config_nan", '{"r": 4, "lora_alpha": NaN}', says=("NaN",))
bad_text("config_long_number", '{"r": ' + "9" * 5000 + "}", says=("not valid JSON",))
bad_text("config_half_a_character", '{"r": 4, "\\ud800": 1}', says=("no lone surrogates",))
bad_text("config_number_overflows", '{"lora_alpha": 1e999}', key="lora_alpha", says=("inf",))

# ---- fields of the config ------------------------------------------------------------------------
bad_config("r_zero", "r", ("at least 1", "0"), r=0)
bad_config("r_negative", "r", ("-4",), r=-4)
bad_config("r_bool", "r", ("True",), r=True)
bad_config("r_float", "r", ("2.0",), r=2.0)
bad_config("r_string", "r", ("'2'",), r="2")
bad_config("r_is_another", "lora_A", ("[4, ", "[2, "), r=4)
bad_config("alpha_string", "lora_alpha", ("'16'",), lora_alpha="16")
bad_config("alpha_bool", "lora_alpha", ("True",), lora_alpha=True)
bad_config("alpha_huge", "lora_alpha", (), lora_alpha=10**400)
bad_config("use_rslora_string", "use_rslora", ("'true'",), use_rslora="true")
bad_config("rank_pattern_list", "rank_pattern", ("object",), rank_pattern=["q_proj"])
bad_config("rank_pattern_zero", "rank_pattern", ("o_proj", "0"), rank_pattern={"o_proj": 0})
bad_config("rank_pattern_unlike_tensors", "o_proj", ("[3, ",), rank_pattern={"o_proj": 3})
bad_config("alpha_pattern_null", "alpha_pattern", ("None",), alpha_pattern={"o_proj": None})
bad_config("pattern_does_not_compile", "rank_pattern", ("compile",), rank_pattern={"(q": 2})
bad_config("pattern_closes_the_group", "alpha_pattern", ("compile",), alpha_pattern={"q)|(o": 2})
bad_config("pattern_long", "exclude_modules", ("4096",), exclude_modules="q" * 5000)
bad_config("peft_type_loha", "peft_type", ("LOHA",), peft_type="LOHA")
bad_config("peft_type_number", "peft_type", ("7",), peft_type=7)
bad_config("dora", "use_dora", ("DoRA",), use_dora=True)
bad_config("bias_all", "bias", ("all",), bias="all")
bad_config("lora_bias", "lora_bias", ("bias",), lora_bias=True)
bad_config("modules_to_save", "modules_to_save", ("lm_head",), modules_to_save=["lm_head"])
bad_config("trainable_tokens", "trainable_token_indices", ("5",), trainable_token_indices=[5])
bad_config("layer_replication", "layer_replication", ("renumbered",), layer_replication=[[0, 2]])
bad_config("pissa", "init_lora_weights", ("pissa_niter_4",), init_lora_weights="pissa_niter_4")
bad_config("olora", "init_lora_weights", ("olora",), init_lora_weights="olora")
bad_config("lora_ga", "init_lora_weights", ("lora_ga",), init_lora_weights="lora_ga")
bad_config("loftq", "init_lora_weights", ("loftq",), init_lora_weights="loftq")
bad_config("alora", "alora_invocation_tokens", ("tokens",), alora_invocation_tokens=[1, 2])
bad_config("qalora", "use_qalora", ("pooled",), use_qalora=True)
bad_config("bdlora", "use_bdlora", ("block",), use_bdlora={"nblocks": 2})
bad_config("kasa", "kasa_config", ("diagonal",), kasa_config={"beta": 1.0})
bad_config("arrow", "arrow_config", ("routed",), arrow_config={"top_k": 2})
bad_config("velora", "velora_config", (), velora_config={"num_groups": 2})
bad_config("monteclora", "monteclora_config", ("sampled",), monteclora_config={"num_samples": 2})
bad_config("megatron", "megatron_config", ("Megatron",), megatron_config={"tp": 2})
bad_config("fan_in_fan_out", "fan_in_fan_out", ("transposed",), fan_in_fan_out=True)
bad_config("tied_adapters", "ensure_weight_tying", ("tied",), ensure_weight_tying=True)
bad_config("unknown_option", "use_novel_maths", ("not known",), use_novel_maths=True)
bad_config("no_targets", "target_modules", ("target",), target_modules=...)
bad_config("targets_number", "target_modules", ("7",), target_modules=7)
bad_config("targets_mixed", "target_modules", ("list of strings",), target_modules=["o_proj", 3])
bad_config(
    "parameters_string", "target_parameters", ("list",), target_parameters="experts.down_proj"
)
bad_config(
    "layers_with_pattern", "layers_to_transform", (), target_modules=".*", layers_to_transform=[0]
)
bad_config("layers_negative", "layers_to_transform", ("-1",), layers_to_transform=[-1])
bad_config("layers_pattern_alone", "layers_pattern", (), layers_pattern="layers")
bad_config("b_layout_unknown", "lora_B_layout", ("zigzag",), lora_B_layout="zigzag")
bad_config("too_few_targets", "gate_proj", ("not target",), target_modules=["o_proj"])
bad_config(
    "too_few_layers",
    "layers.",
    ("not target", "layers_to_transform [1, 2]"),
    layers_to_transform=[1, 2],
)
bad_config(
    "too_many_targets", "kv_b_proj", ("no tensors",),
    target_modules=["gate_proj", "up_proj", "down_proj", "o_proj", "kv_b_proj"],
)  # fmt: skip
bad_config("all_linear_attention_missing", "q_a_proj", ("all",), target_modules="all-linear")
bad_config("excluded_but_there", "o_proj", ("not target", "left out"), exclude_modules=["o_proj"])
bad_config(
    "packed_parameter_unnamed", "experts", ("not target",), source="experts",
    target_parameters=["experts.down_proj"],
)  # fmt: skip
bad_config(
    "packed_rank_pattern", "experts", ("32", "16"), source="experts",
    rank_pattern={"experts.down_proj": 4},
)  # fmt: skip


# ---- the tensor file -----------------------------------------------------------------------------
@bad(says=("too short", "0 bytes"))
def file_empty(folder):
    (folder / TENSORS).write_bytes(b"")


@bad(says=("longer than the file",))
def file_cut_in_the_header(folder):
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:50])


@bad(says=("bytes",))
def file_cut_in_the_data(folder):
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-10])


@bad(says=("bytes",))
def file_longer_than_its_header_says(folder):
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes() + bytes(16))


@bad(says=("header",))
def header_length_huge(folder):
    data = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(struct.pack("<Q", 1 << 62) + data[8:])


@bad(says=("longer than the file",))
def really_a_pickle(folder):
    (folder / TENSORS).write_bytes(b"\x80\x04\x95" + bytes(200))


@bad_header(says=("not valid JSON",))
def header_not_json(header, data):
    return "{" + "x" * 40, data


@bad_header(key="o_proj", says=("twice",))
def header_names_a_tensor_twice(header, data):
    name = next(n for n in header if "o_proj" in n)
    entry = json.dumps(header[name])
    return json.dumps(header)[:-1] + f', "{name}": {entry}}}', data


def _entry(header: dict, text: str = "o_proj.lora_A") -> dict:
    return header[next(name for name in header if text in name)]


@bad_header(says=("overlap",))
def header_overlap(header, data):
    first, second = sorted((e["data_offsets"][0], n) for n, e in header.items() if "." in n)[:2]
    size = header[second[1]]["data_offsets"][1] - second[0]
    header[second[1]]["data_offsets"] = [second[0] - 4, second[0] - 4 + size]
    return header, data


@bad_header(says=("hole",))
def header_hole(header, data):
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    return header, bytes(8) + data


@bad_header(key="o_proj", says=("bytes for F32",))
def header_shape_unlike_offsets(header, data):
    _entry(header)["shape"][0] += 1
    return header, data


@bad_header(key="o_proj", says=("shape",))
def header_shape_negative(header, data):
    _entry(header)["shape"] = [-4, -48]
    return header, data


@bad_header(key="o_proj", says=("data_offsets",))
def header_without_offsets(header, data):
    del _entry(header)["data_offsets"]
    return header, data


@bad_header(key="o_proj", says=("F7",))
def header_dtype_unknown(header, data):
    _entry(header)["dtype"] = "F7"
    return header, data


@bad_header(key="o_proj", says=("I32", "BF16"))
def dtype_integer(header, data):
    _entry(header)["dtype"] = "I32"
    return header, data


@bad_header(key="__metadata__")
def header_metadata_not_text(header, data):
    header["__metadata__"] = {"format": 1}
    return header, data


@bad_tensors(key="o_proj", says=("F64",))
def dtype_float64(tensors):
    tensors[f"{O_PROJ}.lora_A.weight"] = tensors[f"{O_PROJ}.lora_A.weight"].astype(np.float64)


@bad_tensors(key="o_proj", says=("F8_E4M3",))
def dtype_float8(tensors):
    small = tensors[f"{O_PROJ}.lora_A.weight"].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{O_PROJ}.lora_A.weight"] = small


@bad_tensors(says=("no LoRA tensors",))
def no_tensors(tensors):
    tensors.clear()


# ---- values --------------------------------------------------------------------------------------
@bad_tensors(key="o_proj.lora_B", says=("nan", "[3, 1]"))
def value_nan(tensors):
    tensors[f"{O_PROJ}.lora_B.weight"][3, 1] = np.nan


@bad_tensors(key="experts.5.up_proj", says=("inf",))
def value_infinite_in_one_expert(tensors):
    tensors[f"{EXPERTS}.5.up_proj.lora_A.weight"][0, 0] = -np.inf


@bad_tensors(source="experts", key="experts.lora_A", says=("nan", "[7, 2], of expert 3"))
def value_nan_in_packed(tensors):
    tensors[f"{EXPERTS}.lora_A.weight"][7, 2] = np.nan


@bad_tensors(key="o_proj", says=("nan",))
def value_nan_bfloat16(tensors):
    a = tensors[f"{O_PROJ}.lora_A.weight"].astype(ml_dtypes.bfloat16)
    a[0, 0] = np.nan
    tensors[f"{O_PROJ}.lora_A.weight"] = a


@bad_tensors(key="o_proj", says=("inf",))
def value_infinite_float16(tensors):
    a = tensors[f"{O_PROJ}.lora_A.weight"].astype(np.float16)
    a[1, 1] = np.inf
    tensors[f"{O_PROJ}.lora_A.weight"] = a


# ---- names ---------------------------------------------------------------------------------------
def _copied(tensors: dict, old: str, new: str) -> None:
    for name in [n for n in tensors if n.startswith(old)]:
        tensors[name.replace(old, new)] = tensors[name].copy()


@bad_tensors(key="self_attn.z_proj", says=("z_proj",))
def module_unknown(tensors):
    _copied(tensors, O_PROJ, f"{L1}.self_attn.z_proj")


@bad_tensors(key="layers.7.", says=("3 layers",))
def layer_unknown(tensors):
    _copied(tensors, O_PROJ, f"{P}model.layers.7.self_attn.o_proj")


@bad_tensors(key="experts.8.", says=("0 to 7",))
def expert_unknown(tensors):
    _copied(tensors, f"{EXPERTS}.7.", f"{EXPERTS}.8.")


@bad_tensors(key="experts.007.")
def expert_number_spelt_oddly(tensors):
    _copied(tensors, f"{EXPERTS}.7.", f"{EXPERTS}.007.")


@bad_tensors(key="lora_magnitude_vector", says=("DoRA", "merge"))
def tensor_of_dora(tensors):
    tensors[f"{O_PROJ}.lora_magnitude_vector"] = np.ones(64, np.float32)


@bad_tensors(key="lora_B.bias", says=("bias",))
def tensor_of_bias(tensors):
    tensors[f"{O_PROJ}.lora_B.bias"] = np.ones(64, np.float32)


@bad_tensors(key="lm_head.weight", says=("whole embedding or head",))
def tensor_of_full_head(tensors):
    tensors[f"{P}lm_head.weight"] = np.ones((256, 64), np.float32)


@bad_tensors(key="o_proj.base_layer.weight")
def tensor_of_base_projection(tensors):
    tensors[f"{O_PROJ}.base_layer.weight"] = np.ones((64, 48), np.float32)


@bad_tensors(key="lm_head.base_layer", says=("vocabulary", "[256, 64]", "[300, 64]"))
def base_copy_of_other_vocabulary(tensors):
    tensors[f"{P}lm_head.base_layer.weight"] = np.ones((300, 64), np.float32)


@bad_tensors(key="lora_embedding_A")
def embedding_names_on_a_linear(tensors):
    tensors[f"{O_PROJ}.lora_embedding_A"] = tensors.pop(f"{O_PROJ}.lora_A.weight")


@bad_tensors(key="o_proj.lora_A", says=("no lora_B", "o_proj.lora_B.weight"))
def a_without_b(tensors):
    del tensors[f"{O_PROJ}.lora_B.weight"]


@bad_tensors(key="experts.3.up_proj.lora_B", says=("no lora_A",))
def b_without_a_in_one_expert(tensors):
    del tensors[f"{EXPERTS}.3.up_proj.lora_A.weight"]


@bad_tensors(key="layers.1.self_attn.o_proj", says=("no tensors",))
def projection_missing(tensors):
    for side in "AB":
        del tensors[f"{O_PROJ}.lora_{side}.weight"]


@bad_tensors(key="experts.6.down_proj", says=("no tensors", r".*\\.mlp\\.experts\\..*"))
def expert_missing(tensors):
    for side in "AB":
        del tensors[f"{EXPERTS}.6.down_proj.lora_{side}.weight"]


@bad_tensors(key="experts", says=("no tensors",))
def routed_experts_missing(tensors):
    for name in [n for n in tensors if ".experts." in n]:
        del tensors[name]


@bad_tensors(key="lora_", says=("more than one adapter",))
def two_adapters(tensors):
    for name in [n for n in tensors if ".layers.1." in n]:
        tensors[name.replace(".weight", ".poet.weight")] = tensors.pop(name)


@bad_tensors(key="o_proj", says=("same factor",))
def factor_with_and_without_prefix(tensors):
    _copied(tensors, O_PROJ, O_PROJ.removeprefix(P))


@bad_tensors(key="experts.0.", says=("same factor",))
def factor_under_two_names(tensors):
    _copied(tensors, f"{EXPERTS}.0.gate_proj", f"{EXPERTS}.0.w1")


@bad_tensors(source="shared_outer", key="experts.0.gate_proj", says=("same factor",))
def factor_stacked_and_per_expert(tensors):
    for side, shape in (("A", (2, 64)), ("B", (24, 2))):
        tensors[f"{EXPERTS}.0.gate_proj.lora_{side}.weight"] = np.ones(shape, np.float32)


@bad_tensors(source="experts", key="experts", says=("same factor",))
def factor_packed_and_per_expert(tensors):
    for side, shape in (("A", (2, 64)), ("B", (24, 2))):
        tensors[f"{EXPERTS}.0.gate_proj.lora_{side}.weight"] = np.ones(shape, np.float32)


# ---- shapes --------------------------------------------------------------------------------------
@bad_tensors(key="o_proj.lora_A", says=("[2, 48]", "[2, 96]", "another base model"))
def width_in_wrong(tensors):
    a = tensors[f"{O_PROJ}.lora_A.weight"]
    tensors[f"{O_PROJ}.lora_A.weight"] = np.concatenate([a, a], axis=1)


@bad_tensors(key="o_proj.lora_B", says=("[64, 2]", "[128, 2]"))
def width_out_wrong(tensors):
    b = tensors[f"{O_PROJ}.lora_B.weight"]
    tensors[f"{O_PROJ}.lora_B.weight"] = np.concatenate([b, b])


@bad_tensors(key="o_proj", says=("[2, 48]", "[48, 2]"))
def transposed(tensors):
    tensors[f"{O_PROJ}.lora_A.weight"] = tensors[f"{O_PROJ}.lora_A.weight"].T


@bad_tensors(key="o_proj.lora_B", says=("[64, 2]", "[64, 3]"))
def ranks_differ(tensors):
    tensors[f"{O_PROJ}.lora_B.weight"] = np.ones((64, 3), np.float32)


@bad_tensors(key="experts.2.gate_proj", says=("[2, 64]", "[1, 64]"))
def rank_differs_in_one_expert(tensors):
    for side, shape in (("A", (1, 64)), ("B", (24, 1))):
        tensors[f"{EXPERTS}.2.gate_proj.lora_{side}.weight"] = np.ones(shape, np.float32)


@bad_tensors(key="o_proj", says=("[2, 48]", "[48]"))
def one_dimension(tensors):
    tensors[f"{O_PROJ}.lora_A.weight"] = np.ones(48, np.float32)


@bad_tensors(key="o_proj", says=("[0, 48]",))
def zero_size(tensors):
    tensors[f"{O_PROJ}.lora_A.weight"] = np.ones((0, 48), np.float32)
    tensors[f"{O_PROJ}.lora_B.weight"] = np.ones((64, 0), np.float32)


@bad_tensors(key="experts.0.", says=("dtype",))
def dtypes_of_experts_differ(tensors):
    name = f"{EXPERTS}.0.up_proj.lora_A.weight"
    tensors[name] = tensors[name].astype(np.float16)


@bad_tensors(source="shared_outer", key="experts.w1.lora_B", says=("8 or 1", "[4, 24, 2]"))
def stacked_experts_too_few(tensors):
    tensors[f"{EXPERTS}.w1.lora_B.weight"] = tensors[f"{EXPERTS}.w1.lora_B.weight"][:4]


@bad_tensors(source="shared_outer", key="experts.w1.lora_A", says=("8 or 1", "[2, 64]"))
def stacked_without_its_expert_dimension(tensors):
    tensors[f"{EXPERTS}.w1.lora_A.weight"] = tensors[f"{EXPERTS}.w1.lora_A.weight"][0]


@bad_tensors(source="experts", key="experts.lora_A", says=("16", "12"))
def packed_experts_too_few(tensors):
    for name in (f"{EXPERTS}.lora_A.weight", f"{EXPERTS}.lora_B.weight"):
        tensors[name] = tensors[name][:12] if "lora_A" in name else tensors[name][:, :12]


@bad_tensors(source="experts", key="experts.base_layer", says=("down_proj",))
def packed_inner_alone(tensors):
    for side in "AB":
        del tensors[f"{EXPERTS}.lora_{side}.weight"]


@bad_tensors(source="experts", key="experts", says=("gate_up_proj", "down_proj"))
def packed_single_but_both_named(tensors):
    for side in "AB":
        tensors[f"{EXPERTS}.lora_{side}.weight"] = tensors.pop(
            f"{EXPERTS}.base_layer.lora_{side}.weight"
        )


@bad_tensors(source="experts", key="experts", says=("orientation",))
def packed_orientations_mixed(tensors):
    a, b = (tensors[f"{EXPERTS}.lora_{side}.weight"] for side in "AB")
    tensors[f"{EXPERTS}.lora_A.weight"], tensors[f"{EXPERTS}.lora_B.weight"] = b.T, a.T


@bad(source="attn", key="lora_", says=(str(MAX_RANK), "64"))
def rank_above_the_limit(folder):
    tensors = {}
    for name, value in load_file(folder / TENSORS).items():
        axis = 0 if "lora_A" in name else 1
        tensors[name] = np.ascontiguousarray(np.repeat(value, 16, axis=axis))
    save_file(tensors, folder / TENSORS)
    config = json.loads((folder / CONFIG).read_text()) | {"r": 64}
    (folder / CONFIG).write_text(json.dumps(config))


@bad_tensors(source="attn", key="self_attn", says=("another base model",))
def of_a_wider_model(tensors):
    for name, value in list(tensors.items()):
        tensors[name] = np.repeat(value, 2, axis=1 if "lora_A" in name else 0)


@bad(source="attn", key="layers.0", says=("base model",))
def of_another_family(folder):
    for name in (CONFIG, TENSORS):
        shutil.copy(GOLDEN / "qwen3_moe" / "adapters" / "attn" / name, folder / name)
