"""Ways to break a checkpoint folder.

`CORPUS[name](folder)` breaks a copy of `tests/golden/qwen3_moe/base` in place. The function's
`file` and `key` are what the refusal has to name (`file` as a name in the folder, "" for the
folder itself; `key` None where no one key is wrong).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.checkpoint import raw
from tests.checkpoint.raw import INDEX, SINGLE

CORPUS: dict[str, Callable[[Path], None]] = {}
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.norm.weight"
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
STACKED = "model.layers.0.mlp.experts.gate_up_proj"
SHARD = "model-00001-of-00003.safetensors"
SHARD_2 = "model-00002-of-00003.safetensors"


def breaks(file: str, key: str | None = None):
    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        function.file, function.key = file, key
        CORPUS[function.__name__] = function
        return function

    return register


def edit(folder: Path, **changes) -> None:
    """Rewrites the single file with `name=(type, shape, data)`; None removes a tensor."""
    tensors = raw.load(folder / SINGLE) | changes
    raw.store(folder / SINGLE, {name: t for name, t in tensors.items() if t is not None})


def edit_entry(folder: Path, name: str, entry: object) -> None:
    """Replaces one header entry, leaving the data alone. A dict is merged into the old entry."""
    header, data = raw.layout(raw.load(folder / SINGLE))
    header[name] = header[name] | entry if isinstance(entry, dict) else entry
    raw.store_text(folder / SINGLE, json.dumps(header), data)


def edit_index(folder: Path, change: Callable[[dict], object]) -> None:
    raw.shard(folder)
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def size_of(folder: Path, name: str) -> int:
    return len(raw.load(folder / SINGLE)[name][2])


# ------------------------------------------------------------------------------------- tensors
@breaks("", NORM)
def missing_tensor(folder):
    edit(folder, **{NORM: None})


@breaks("", EXPERT)
def missing_expert(folder):
    edit(folder, **{EXPERT: None})


@breaks("", "lm_head.weight")
def missing_head(folder):
    edit(folder, **{"lm_head.weight": None})


@breaks(SINGLE, "model.layers.0.self_attn.q_proj.bias")
def unknown_tensor(folder):
    edit(folder, **{"model.layers.0.self_attn.q_proj.bias": ("F32", [128], bytes(512))})


@breaks(SINGLE, "model.layers.0.mlp.experts.8.up_proj.weight")
def one_expert_too_many(folder):
    tensors = raw.load(folder / SINGLE)
    edit(folder, **{"model.layers.0.mlp.experts.8.up_proj.weight": tensors[EXPERT]})


@breaks(SINGLE, "model.layers.0.mlp.experts.0.gate_proj.weight")
def experts_in_both_layouts(folder):
    edit(folder, **{STACKED: ("F32", [8, 48, 64], bytes(8 * 48 * 64 * 4))})


@breaks(SINGLE, STACKED)
def fused_experts_transposed(folder):
    edit(folder, **{STACKED: ("F32", [8, 64, 48], bytes(8 * 48 * 64 * 4))})


@breaks(SINGLE, "model.layers.3.self_attn.o_proj.weight")
def more_layers_than_configured(folder):
    tensors = raw.load(folder / SINGLE)
    edit(folder, **{"model.layers.3.self_attn.o_proj.weight": tensors[O_PROJ]})


@breaks(SINGLE, O_PROJ)
def wrong_shape(folder):
    edit_entry(folder, O_PROJ, {"shape": [128, 64]})


@breaks(SINGLE, O_PROJ)
def wrong_rank(folder):
    edit_entry(folder, O_PROJ, {"shape": [64, 128, 1]})


@breaks(SINGLE, EXPERT)
def wrong_expert_shape(folder):
    edit_entry(folder, EXPERT, {"shape": [64, 24]})


@breaks(SINGLE, O_PROJ)
def float64_weight(folder):
    edit(folder, **{O_PROJ: ("F64", [64, 128], bytes(64 * 128 * 8))})


@breaks(SINGLE, O_PROJ)
def integer_weight(folder):
    edit(folder, **{O_PROJ: ("I32", [64, 128], bytes(64 * 128 * 4))})


@breaks(SINGLE, O_PROJ)
def fp8_weight(folder):
    edit(folder, **{O_PROJ: ("F8_E4M3", [64, 128], bytes(64 * 128))})


@breaks("", STACKED)
def experts_of_two_types(folder):
    edit(folder, **{EXPERT: ("BF16", [24, 64], bytes(24 * 64 * 2))})


# -------------------------------------------------------------------------------------- headers
@breaks(SINGLE)
def truncated_data(folder):
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:-100])


@breaks(SINGLE)
def truncated_header(folder):
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:200])


@breaks(SINGLE)
def truncated_length(folder):
    (folder / SINGLE).write_bytes(b"\x10\0\0")


@breaks(SINGLE)
def empty_file(folder):
    (folder / SINGLE).write_bytes(b"")


@breaks(SINGLE)
def bytes_after_the_data(folder):
    with open(folder / SINGLE, "ab") as file:
        file.write(b"more")


@breaks(SINGLE)
def huge_header_length(folder):
    file = folder / SINGLE
    file.write_bytes((2**63).to_bytes(8, "little") + file.read_bytes()[8:])


@breaks(SINGLE)
def header_not_json(folder):
    raw.store_text(folder / SINGLE, "{'model.norm.weight': 1}", b"")


@breaks(SINGLE)
def header_a_list(folder):
    raw.store_text(folder / SINGLE, "[]", b"")


@breaks(SINGLE)
def header_not_utf8(folder):
    raw.store_text(folder / SINGLE, b'{"\xff\xfe": 1}', b"")


@breaks(SINGLE)
def header_nested_deeply(folder):
    raw.store_text(folder / SINGLE, '{"a":' * 200_000, b"")


@breaks(SINGLE, NORM)
def duplicate_key(folder):
    header, data = raw.layout(raw.load(folder / SINGLE))
    again = json.dumps({NORM: header[NORM]})
    raw.store_text(folder / SINGLE, json.dumps(header)[:-1] + "," + again[1:], data)


@breaks(SINGLE, "__metadata__")
def metadata_not_text(folder):
    edit_entry(folder, "__metadata__", {"format": 1})


@breaks(SINGLE, NORM)
def entry_not_an_object(folder):
    edit_entry(folder, NORM, [1, 2])


@breaks(SINGLE, NORM)
def entry_with_unknown_field(folder):
    edit_entry(folder, NORM, {"strides": [1]})


@breaks(SINGLE, NORM)
def unknown_dtype(folder):
    edit_entry(folder, NORM, {"dtype": "F31"})


@breaks(SINGLE, NORM)
def dtype_not_text(folder):
    edit_entry(folder, NORM, {"dtype": ["F32"]})


@breaks(SINGLE, NORM)
def negative_dimension(folder):
    edit_entry(folder, NORM, {"shape": [-64]})


@breaks(SINGLE, NORM)
def dimension_a_flag(folder):
    edit_entry(folder, NORM, {"shape": [64, True]})


@breaks(SINGLE, NORM)
def huge_dimension(folder):
    edit_entry(folder, NORM, {"shape": [2**62, 2**62, 0]})


@breaks(SINGLE, NORM)
def too_many_dimensions(folder):
    edit_entry(folder, NORM, {"shape": [64] + [1] * 100})


@breaks(SINGLE, NORM)
def offsets_beyond_the_file(folder):
    edit_entry(folder, NORM, {"data_offsets": [10**9, 10**9 + size_of(folder, NORM)]})


@breaks(SINGLE, NORM)
def offsets_reversed(folder):
    edit_entry(folder, NORM, {"data_offsets": [512, 256]})


@breaks(SINGLE, NORM)
def offsets_fractional(folder):
    edit_entry(folder, NORM, {"data_offsets": [0.0, 256.0]})


@breaks(SINGLE, NORM)
def offsets_not_of_the_shape(folder):
    edit_entry(folder, NORM, {"shape": [63]})


@breaks(SINGLE)
def offsets_overlap(folder):
    edit_entry(folder, NORM, {"data_offsets": [0, size_of(folder, NORM)]})


@breaks(SINGLE)
def hole_in_the_data(folder):
    header, data = raw.layout(raw.load(folder / SINGLE))
    del header[O_PROJ]
    raw.store_text(folder / SINGLE, json.dumps(header), data)


@breaks(SINGLE)
def git_lfs_pointer(folder):
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")


# --------------------------------------------------------------------------- files and the index
@breaks("")
def no_weights(folder):
    (folder / SINGLE).unlink()


@breaks("")
def only_pickle(folder):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


@breaks(SINGLE)
def weights_are_a_folder(folder):
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()


@breaks(SHARD_2)
def missing_shard(folder):
    raw.shard(folder)
    (folder / SHARD_2).unlink()


@breaks(SHARD)
def truncated_shard(folder):
    raw.shard(folder)
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1])


@breaks(SHARD, "model.layers.9.absent")
def indexed_tensor_not_in_shard(folder):
    edit_index(folder, lambda index: index["weight_map"].update({"model.layers.9.absent": SHARD}))


@breaks(SHARD_2, NORM)
def tensor_of_another_shard(folder):
    norm = raw.load(folder / SINGLE)[NORM]
    edit_index(folder, lambda index: index["weight_map"].update({NORM: SHARD}))
    for shard, change in ((SHARD, {NORM: norm}), (SHARD_2, {NORM: norm})):
        raw.store(folder / shard, raw.load(folder / shard) | change)


@breaks(INDEX, NORM)
def shard_outside_the_folder(folder):
    edit_index(folder, lambda index: index["weight_map"].update({NORM: "../other.safetensors"}))


@breaks(INDEX, NORM)
def shard_with_absolute_path(folder):
    edit_index(folder, lambda index: index["weight_map"].update({NORM: "/tmp/x.safetensors"}))


@breaks(INDEX, NORM)
def shard_not_safetensors(folder):
    edit_index(folder, lambda index: index["weight_map"].update({NORM: "pytorch_model.bin"}))


@breaks(INDEX, NORM)
def shard_name_not_text(folder):
    edit_index(folder, lambda index: index["weight_map"].update({NORM: 1}))


@breaks(INDEX, "weight_map")
def index_without_weight_map(folder):
    edit_index(folder, lambda index: index.pop("weight_map"))


@breaks(INDEX)
def index_not_json(folder):
    raw.shard(folder)
    (folder / INDEX).write_text("model.safetensors")


# ------------------------------------------------------------------------------------ config.json
@breaks("config.json", "quantization_config.weight_block_size")
def quantized(folder):
    edit_config(folder, quantization_config={"quant_method": "fp8"})


@breaks("config.json", "model_type")
def other_model_type(folder):
    edit_config(folder, model_type="mamba")


@breaks("config.json")
def config_truncated(folder):
    file = folder / "config.json"
    file.write_text(file.read_text()[:-20])


@breaks("config.json")
def config_missing(folder):
    (folder / "config.json").unlink()


@breaks(SINGLE, "model.embed_tokens.weight")
def config_of_another_vocabulary(folder):
    edit_config(folder, vocab_size=512)


@breaks("", "model.layers.3.input_layernorm.weight")
def config_of_a_deeper_model(folder):
    edit_config(folder, num_hidden_layers=4)


@breaks(SINGLE, "model.layers.2.input_layernorm.weight")
def config_of_a_shorter_model(folder):
    edit_config(folder, num_hidden_layers=2)


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
