from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lora_moe_jax.checkpoint.names import expected_tensors
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.checkpoint.safetensors_file import SafetensorsFile
from lora_moe_jax.checkpoint.writer import write_checkpoint
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import AdapterError, CheckpointError, ConfigError
from tests.checkpoint import raw
from tests.checkpoint.corpus import CORPUS, edit, edit_config

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ["qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
FUSED_FAMILIES = FAMILIES[1:4]
BF16 = np.dtype(ml_dtypes.bfloat16)


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, read_config(folder))


def copy_base(folder: Path, family: str = "qwen3_moe", base: str = "base") -> Path:
    return Path(shutil.copytree(GOLDEN / family / base, folder / "base"))


def reference(family: str) -> dict[str, np.ndarray]:
    """Canonical tensors built from the hub layout with the safetensors library."""
    hub = load_file(GOLDEN / family / "base/model.safetensors")
    tensors = {name: value for name, value in hub.items() if ".experts." not in name}
    moe = read_config(GOLDEN / family / "base").moe
    for layer, sparse in enumerate(moe.sparse_layers if moe else ()):
        prefix = f"model.layers.{layer}.mlp.experts."
        if family == "gpt_oss":
            gate_up, bias = hub[prefix + "gate_up_proj"], hub[prefix + "gate_up_proj_bias"]
            halves = [gate_up[..., place::2].swapaxes(1, 2) for place in (0, 1)]
            tensors[prefix + "gate_up_proj"] = np.stack(halves, axis=1)
            tensors[prefix + "gate_up_proj_bias"] = np.stack([bias[:, 0::2], bias[:, 1::2]], axis=1)
            tensors[prefix + "down_proj"] = hub[prefix + "down_proj"].swapaxes(1, 2)
            tensors[prefix + "down_proj_bias"] = hub[prefix + "down_proj_bias"]
        elif sparse:
            gate, up, down = (
                np.stack([hub[f"{prefix}{e}.{leaf}_proj.weight"] for e in range(moe.num_experts)])
                for leaf in ("gate", "up", "down")
            )
            tensors[prefix + "gate_up_proj"] = np.stack([gate, up], axis=1)
            tensors[prefix + "down_proj"] = down
    return tensors


def assert_equal(checkpoint: Checkpoint, tensors: dict[str, np.ndarray]) -> None:
    assert checkpoint.names().keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = checkpoint.read(name)
        info = checkpoint.names()[name]
        assert (info.shape, info.dtype) == (tensor.shape, tensor.dtype), name
        assert found.dtype == tensor.dtype and found.flags.writeable
        assert found.tobytes() == tensor.tobytes(), name


def random_tensors(config: ModelConfig, dtype: np.dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape, np.float32).astype(
            np.float32 if name.endswith("correction_bias") else dtype
        )
        for name, shape in expected_tensors(config).items()
    }


# --------------------------------------------------------------------------------------- reading
@pytest.mark.parametrize("family", FAMILIES)
def test_hub_layout(family):
    assert_equal(open_checkpoint(GOLDEN / family / "base"), reference(family))


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_fused_layout(family):
    assert_equal(open_checkpoint(GOLDEN / family / "base_fused"), reference(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_v4_config(family):
    base = GOLDEN / family / "base"
    config = ModelConfig.from_json(base / "config_v4.json")
    assert_equal(Checkpoint.open(base, config), reference(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_shards(tmp_path, family):
    folder = copy_base(tmp_path, family)
    raw.shard(folder)
    assert_equal(open_checkpoint(folder), reference(family))


def test_single_file_wins_over_shards(tmp_path):
    folder = copy_base(tmp_path)
    raw.shard(folder)
    shutil.copy(GOLDEN / "qwen3_moe/base/model.safetensors", folder)
    (folder / raw.INDEX).write_text("{}")
    assert_equal(open_checkpoint(folder), reference("qwen3_moe"))


def test_layouts_may_differ_by_layer(tmp_path):
    folder = copy_base(tmp_path)
    fused = raw.load(GOLDEN / "qwen3_moe/base_fused/model.safetensors")
    hub = raw.load(folder / raw.SINGLE)
    mixed = {n: t for n, t in hub.items() if not n.startswith("model.layers.2.mlp")}
    mixed |= {n: t for n, t in fused.items() if n.startswith("model.layers.2.mlp")}
    raw.store(folder / raw.SINGLE, mixed)
    assert_equal(open_checkpoint(folder), reference("qwen3_moe"))


@pytest.mark.parametrize("base", ["base", "base_fused"])
@pytest.mark.parametrize(
    "index",
    [
        (slice(2, 5),),
        (slice(None), slice(0, 1)),
        (slice(None), slice(1, 2), slice(3, 11)),
        (slice(6, 8), slice(None), slice(None), slice(0, 64, 3)),
        (slice(3, 3),),
        (slice(-2, None), slice(None, None, -1)),
    ],
)
def test_slices_of_experts(base, index):
    checkpoint = open_checkpoint(GOLDEN / "qwen3_moe" / base)
    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.2.mlp.experts.{name}"
        expected = reference("qwen3_moe")[name]
        part = index[: expected.ndim]
        np.testing.assert_array_equal(checkpoint.read(name, part), expected[part], strict=True)


def test_slices_of_ordinary_tensors():
    checkpoint = open_checkpoint(GOLDEN / "deepseek_v3/base")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    expected = reference("deepseek_v3")[name]
    for index in [(slice(28, 56),), (slice(None), slice(4, 8)), (slice(0, 0),), ()]:
        np.testing.assert_array_equal(checkpoint.read(name, index), expected[index], strict=True)


def test_conversion_rounds_to_nearest_even():
    checkpoint = open_checkpoint(GOLDEN / "qwen3_moe/base")
    for name in ("model.norm.weight", "model.layers.0.mlp.experts.gate_up_proj"):
        found = checkpoint.read(name, (slice(0, 2),), dtype=BF16)
        bits = reference("qwen3_moe")[name][:2].view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        np.testing.assert_array_equal(found.view(np.uint16), rounded.astype(np.uint16))


@pytest.mark.parametrize("family", FAMILIES[1:])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)])
def test_half_precision_files(tmp_path, family, dtype):
    config = read_config(GOLDEN / family / "base")
    tensors = random_tensors(config, dtype)
    write_checkpoint(tmp_path / "out", config, tensors.items())
    checkpoint = open_checkpoint(tmp_path / "out")
    assert_equal(checkpoint, tensors)
    name = "model.layers.2.mlp.experts.down_proj"
    wide = checkpoint.read(name, (slice(1, 3),), dtype=np.float32)
    np.testing.assert_array_equal(wide, tensors[name][1:3].astype(np.float32))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_unaligned_data(tmp_path, dtype):
    folder = copy_base(tmp_path)
    tensors = raw.load(folder / raw.SINGLE)
    if dtype == "BF16":
        tensors = {n: ("BF16", s, d[: len(d) // 2]) for n, (_, s, d) in tensors.items()}
    header, data = raw.layout(tensors)
    for padding in range(4):
        text = raw.json.dumps(header)
        raw.store_text(folder / raw.SINGLE, text + " " * ((padding - len(text)) % 8), data)
        checkpoint = open_checkpoint(folder)
        for name in ("model.norm.weight", "lm_head.weight"):
            assert checkpoint.read(name).tobytes() == tensors[name][2]
            part = checkpoint.read(name, (slice(1, 60),), dtype=np.float32)
            whole = np.frombuffer(tensors[name][2], checkpoint.names()[name].dtype)
            whole = whole.reshape(tensors[name][1])[1:60].astype(np.float32)
            assert part.tobytes() == whole.tobytes()


def test_shards_without_their_index(tmp_path):
    folder = copy_base(tmp_path, "qwen3")
    (folder / raw.SINGLE).rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="is missing: fetch") as caught:
        open_checkpoint(folder)
    assert caught.value.found == "model-00001-of-00001.safetensors"


def test_tied_head_is_ignored(tmp_path):
    folder = copy_base(tmp_path, "qwen3")
    embedding = raw.load(folder / raw.SINGLE)["model.embed_tokens.weight"]
    edit(folder, **{"lm_head.weight": embedding})
    assert "lm_head.weight" not in open_checkpoint(folder).names()


def test_a_head_of_its_own_is_no_tied_one(tmp_path):
    folder = copy_base(tmp_path, "qwen3")
    edit(folder, **{"lm_head.weight": ("F32", [256, 64], bytes(256 * 64 * 4))})
    with pytest.raises(CheckpointError, match="the head is another matrix") as caught:
        open_checkpoint(folder)
    assert caught.value.key == "lm_head.weight"
    edit_config(folder, tie_word_embeddings=False)
    assert not open_checkpoint(folder).read("lm_head.weight").any()


def test_prediction_layers_and_buffers_are_ignored(tmp_path):
    folder = copy_base(tmp_path, "deepseek_v3")
    tensors = raw.load(folder / raw.SINGLE)
    extra = {
        name.replace(".layers.2.", ".layers.3."): tensor
        for name, tensor in tensors.items()
        if ".layers.2." in name
    }
    extra["model.layers.3.eh_proj.weight"] = ("F8_E4M3", [64, 128], bytes(64 * 128))
    extra["model.layers.3.enorm.weight"] = ("F32", [64], bytes(256))
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", [4], bytes(16))
    edit(folder, **extra)
    assert_equal(open_checkpoint(folder), reference("deepseek_v3"))


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_attention_biases(tmp_path, family):
    folder = copy_base(tmp_path, family)
    edit_config(folder, attention_bias=True)
    config = read_config(folder)
    biases = {
        "qwen3": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "deepseek_v3": {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"},
    }[family]
    found = {n.split(".")[-2] for n in expected_tensors(config) if n.endswith("_proj.bias")}
    found |= {n.split(".")[-2] for n in expected_tensors(config) if n.endswith("mqa.bias")}
    assert found == biases
    tensors = random_tensors(config, np.dtype(np.float32))
    write_checkpoint(tmp_path / "out", config, tensors.items())
    assert_equal(open_checkpoint(tmp_path / "out"), tensors)


def test_reading_an_unknown_name():
    checkpoint = open_checkpoint(GOLDEN / "qwen3/base")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read("lm_head.weight")
    assert caught.value.key == "lm_head.weight"


def test_memory_of_reading(tmp_path):
    config = read_config(GOLDEN / "qwen3_moe/base")
    config = ModelConfig(**{**vars(config), "vocab_size": 60_000, "tie_word_embeddings": True})
    write_checkpoint(tmp_path / "out", config, random_tensors(config, BF16).items())
    size = 60_000 * 64 * 2
    tracemalloc.start()
    try:
        checkpoint = Checkpoint.open(tmp_path / "out", config)
        assert tracemalloc.get_traced_memory()[1] < size / 8
        part = checkpoint.read("model.embed_tokens.weight", (slice(0, 600),))
        assert tracemalloc.get_traced_memory()[1] < part.nbytes + size / 8
        whole = checkpoint.read("model.embed_tokens.weight", dtype=np.float32)
        assert whole.nbytes == 2 * size
        assert tracemalloc.get_traced_memory()[1] < whole.nbytes + part.nbytes + size / 4
    finally:
        tracemalloc.stop()


# --------------------------------------------------------------------------------------- writing
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000, 1])
def test_written_checkpoint_is_bit_equal(tmp_path, family, max_shard_bytes):
    checkpoint = open_checkpoint(GOLDEN / family / "base")
    config = read_config(GOLDEN / family / "base")
    out = tmp_path / "a/b"
    tensors = ((name, checkpoint.read(name)) for name in reversed(checkpoint.names()))
    write_checkpoint(out, config, tensors, max_shard_bytes=max_shard_bytes)
    assert read_config(out) == config
    assert_equal(open_checkpoint(out), reference(family))
    hub = load_file(GOLDEN / family / "base/model.safetensors")
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 10**9)
    written = {}
    for file in files:  # as any other tool reads them
        assert len(files) == 1 or file.name.endswith(f"-of-{len(files):05d}.safetensors")
        with safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            written |= {name: opened.get_tensor(name) for name in opened.keys()}
    assert written.keys() == hub.keys()
    for name, tensor in hub.items():
        assert written[name].tobytes() == tensor.tobytes(), name
    assert not [path for path in out.parent.iterdir() if path != out]
    if len(files) > 1:
        index = raw.json.loads((out / raw.INDEX).read_text())
        assert index["weight_map"].keys() == hub.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in hub.values())


def bad_writes() -> dict:
    def without(tensors):
        del tensors["model.norm.weight"]
        return tensors.items()

    def renamed(tensors):
        return [("model.norm.bias", tensors["model.norm.weight"])]

    def twice(tensors):
        return [*tensors.items(), ("model.norm.weight", tensors["model.norm.weight"])]

    def reshaped(tensors):
        return (tensors | {"model.norm.weight": tensors["model.norm.weight"][:-1]}).items()

    def doubled(tensors):
        wide = tensors["model.norm.weight"].astype(np.float64)
        return (tensors | {"model.norm.weight": wide}).items()

    return {f.__name__: f for f in (without, renamed, twice, reshaped, doubled)}


@pytest.mark.parametrize("name", bad_writes())
def test_bad_tensors_are_not_written(tmp_path, name):
    tensors = bad_writes()[name](reference("qwen3"))
    out = tmp_path / "out"
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(out, read_config(GOLDEN / "qwen3/base"), tensors, max_shard_bytes=9000)
    assert caught.value.key.startswith("model.norm.")
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(tmp_path):
    config = read_config(GOLDEN / "qwen3/base")
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path, tmp_path / "file", tmp_path / "file/in"):
        with pytest.raises(CheckpointError):
            write_checkpoint(folder, config, reference("qwen3").items())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", config, reference("qwen3").items())
    assert_equal(open_checkpoint(tmp_path / "empty"), reference("qwen3"))


# --------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", CORPUS)
def test_broken_checkpoints_are_refused(tmp_path, name):
    folder = copy_base(tmp_path)
    CORPUS[name](folder)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        open_checkpoint(folder)
    error = caught.value
    assert error.file == str(folder / CORPUS[name].file)
    if CORPUS[name].key is not None:
        assert error.key == CORPUS[name].key
    assert error.expected is not None or error.found is not None


def test_every_truncation_is_refused(tmp_path):
    folder = copy_base(tmp_path, "qwen3")
    config = read_config(folder)
    whole = (folder / raw.SINGLE).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    lengths = {*range(0, 20), *range(header - 3, header + 3), len(whole) // 2, len(whole) - 1}
    for length in sorted(lengths):
        (folder / raw.SINGLE).write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            Checkpoint.open(folder, config)


def test_random_damage_to_headers_raises_nothing_else(tmp_path):
    folder = copy_base(tmp_path, "qwen3")
    config = read_config(folder)
    whole = (folder / raw.SINGLE).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(100):
        damaged = bytearray(whole)
        for position in rng.integers(0, 8 + length, rng.integers(1, 4)):
            damaged[position] = rng.integers(256)
        (folder / raw.SINGLE).write_bytes(damaged)
        try:
            Checkpoint.open(folder, config)
        except CheckpointError:
            refused += 1
    assert refused > 80


def test_missing_folders_are_refused(tmp_path):
    config = read_config(GOLDEN / "qwen3/base")
    for folder in (tmp_path / "absent", tmp_path / "a\0b"):
        with pytest.raises(CheckpointError):
            Checkpoint.open(folder, config)


def test_an_empty_tensor_may_stand_anywhere_in_the_header(tmp_path):
    file = tmp_path / "some.safetensors"
    header = {
        "full": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]},
    }
    raw.store_text(file, json.dumps(header), bytes(8))
    assert SafetensorsFile(file).view("empty").shape == (0, 3)


def test_safetensors_file_raises_the_error_of_its_user(tmp_path):
    file = tmp_path / "adapter.safetensors"
    raw.store(file, {"a": ("F32", [2], bytes(8)), "b": ("F8_E5M2", [2], bytes(2))})
    opened = SafetensorsFile(file, AdapterError)
    assert opened.metadata == {"format": "pt"}
    assert opened.view("a").tolist() == [0.0, 0.0]
    for name in ("b", "c"):
        with pytest.raises(AdapterError):
            opened.view(name)
    file.write_bytes(b"x")
    with pytest.raises(AdapterError):
        SafetensorsFile(file, AdapterError)
