"""Weights of 8 bits with a scale for each block: their values, and checkpoints that have them."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest

from lora_moe_jax import Engine
from lora_moe_jax.checkpoint.fp8 import Fp8Matrix
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import CheckpointError
from tests.adapters.tables import GOLDEN
from tests.checkpoint import raw
from tests.checkpoint.corpus import edit_config
from tests.serving.helpers import probe, prompts

QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
OPTIONS = {
    "dtype": "float32",
    "max_adapters": 1,
    "max_rank": 16,
    "max_length": 64,
    "max_requests": 2,
    "token_buckets": (16,),
    "max_logprobs": 0,
}
KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "bias")  # in other types
SCALE_TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


def test_every_number_in_blocks_of_all_sizes():
    """Of 300 x 200, so that the last blocks are smaller, against the definition."""
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 256, (300, 200)).astype(np.uint8)
    scales = rng.standard_normal((3, 2)).astype(np.float32)
    matrix = Fp8Matrix(weight, scales)
    rows, columns = np.indices(weight.shape) // 128
    wanted = weight.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[rows, columns]
    np.testing.assert_array_equal(matrix[:, :], wanted)
    assert np.isnan(wanted).any() and len(np.unique(wanted)) > 1000
    for part in (slice(3, 290, 7), slice(100, 150)), (slice(128, 256), slice(None)):
        np.testing.assert_array_equal(matrix[part], wanted[part])


def quantize(name, tensor, scale_type: str) -> tuple[dict, np.ndarray]:
    """What the file has in place of a float32 weight, and what that stands for."""
    _, shape, data = tensor
    weight = np.frombuffer(data, np.float32).reshape(shape)
    # One block: the golden models are small. A power of two, which all the types have.
    scale = 2.0 ** np.ceil(np.log2(np.abs(weight).max() / 448))
    stored = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[scale]]).astype(SCALE_TYPES[scale_type])
    assert all(size <= 128 for size in shape)
    kept = {
        name: ("F8_E4M3", shape, stored.tobytes()),
        f"{name}_scale_inv": (scale_type, [1, 1], scales.tobytes()),
    }
    return kept, stored.astype(np.float32) * np.float32(scale)


def quantized(tmp_path, family: str, scale_type: str):
    """Folders of a model in 8 bits, and of one with the values that these stand for."""
    folders = [shutil.copytree(GOLDEN / family / "base", tmp_path / name) for name in "ab"]
    tensors = raw.load(folders[0] / raw.SINGLE)
    small, whole = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        is_weight = name.endswith(".weight") and not any(part in name for part in KEPT)
        if is_weight and max(tensor[1]) <= 128:
            kept, values = quantize(name, tensor, scale_type)
            small |= kept
            whole[name] = ("F32", tensor[1], values.tobytes())
    assert len(small) > len(tensors)
    for folder, its in zip(folders, (small, whole), strict=True):
        raw.store(folder / raw.SINGLE, its)
    edit_config(folders[0], quantization_config=QUANTIZATION)
    return folders


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
def test_a_checkpoint_in_8_bits(tmp_path, scale_type):
    """Experts too, one by one as hubs have them; whole and in parts."""
    found, wanted = (
        Checkpoint.open(folder, read_config(folder))
        for folder in quantized(tmp_path, "deepseek_v3", scale_type)
    )
    for name, info in found.names().items():
        its = wanted.read(name, dtype=np.float32)
        np.testing.assert_array_equal(found.read(name, dtype=np.float32), its)
        rounded = its.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(found.read(name, dtype=ml_dtypes.bfloat16), rounded)
        if len(info.shape) > 1:
            part = (slice(0, 1), slice(1, None))
            np.testing.assert_array_equal(found.read(name, part, np.float32), its[part])


def test_an_engine_in_8_bits(tmp_path):
    """With an adapter, the bits of one on the values that the numbers stand for."""
    engines = [
        Engine.from_pretrained(
            folder, adapters={"a": GOLDEN / "deepseek_v3/adapters/experts"}, **OPTIONS
        )
        for folder in quantized(tmp_path, "deepseek_v3", "F32")
    ]
    for name in (None, "a"):
        assert probe(engines[0], name) == probe(engines[1], name)
    scores = [one.score(prompts([9]), ["a"])[0].logprobs.tobytes() for one in engines]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("damage", ["type", "shape", "missing"])
def test_bad_scales_are_refused(tmp_path, damage):
    folder, _ = quantized(tmp_path, "deepseek_v3", "F32")
    tensors = raw.load(folder / raw.SINGLE)
    weight = "model.layers.1.mlp.experts.3.down_proj.weight"
    name = f"{weight}_scale_inv"
    _, shape, data = tensors.pop(name)
    if damage == "type":
        tensors[name] = ("I32", shape, data)
    if damage == "shape":
        tensors[name] = ("F32", [2, 1], data * 2)
    raw.store(folder / raw.SINGLE, tensors)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder, read_config(folder))
    assert caught.value.key == (weight if damage == "missing" else name)
    assert damage != "missing" or "_scale_inv" in caught.value.hint
