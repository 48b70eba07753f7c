"""4-bit experts: their values one by one, and a checkpoint that has them."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest

from lora_moe_jax.checkpoint.mxfp4 import Mxfp4Matrix
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import CheckpointError
from tests.adapters.tables import GOLDEN
from tests.checkpoint import raw
from tests.checkpoint.corpus import edit_config

EXPERTS, HIDDEN, WIDTH = 8, 64, 32
LEAVES = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}  # [out, in]


def value(nibble: int, scale: int) -> float:
    """Of the format's definition: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return (-size if nibble & 8 else size) * 2.0 ** (scale - 127)


def values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [..., rows, columns], one number at a time."""
    found = np.zeros((*scales.shape, 32))
    for at in np.ndindex(blocks.shape):
        byte, scale = int(blocks[at]), int(scales[at[:-1]])
        found[*at[:-1], 2 * at[-1]] = value(byte & 15, scale)
        found[*at[:-1], 2 * at[-1] + 1] = value(byte >> 4, scale)
    return found.reshape(*scales.shape[:-1], -1)


def random_blocks(*rows_and_blocks: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*rows_and_blocks, 16), dtype=np.uint8)
    return blocks, rng.integers(110, 140, rows_and_blocks, dtype=np.uint8)


def test_every_byte_and_scale():
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(255, axis=0)
    scales = np.arange(255, dtype=np.uint8)[:, None].repeat(16, axis=1)
    matrix = Mxfp4Matrix(blocks, scales)
    found, wanted = matrix[:, :], values(blocks, scales)
    with np.errstate(over="ignore"):  # the largest are infinite in float32
        np.testing.assert_array_equal(found, wanted.astype(np.float32))
        np.testing.assert_array_equal(found.astype(ml_dtypes.bfloat16).astype(np.float32), found)
    part = slice(3, 250, 7), slice(30, 100, 3)
    np.testing.assert_array_equal(matrix[part], found[part])


def test_a_scale_that_is_no_number():
    assert np.isnan(
        Mxfp4Matrix(np.full((1, 1, 16), 0x22, np.uint8), np.full((1, 1), 255))[:, :]
    ).all()


@pytest.fixture
def quantized(tmp_path):
    """The small gpt-oss with experts of 32 features, in 4 bits; and these, [E, out, in]."""
    folder = shutil.copytree(GOLDEN / "gpt_oss" / "base", tmp_path / "base")
    edit_config(folder, intermediate_size=WIDTH, quantization_config={"quant_method": "mxfp4"})
    tensors, wanted = raw.load(folder / raw.SINGLE), {}
    for layer in range(3):
        for leaf, (rows, columns) in LEAVES.items():
            name = f"model.layers.{layer}.mlp.experts.{leaf}"
            del tensors[name]
            blocks, scales = random_blocks(EXPERTS, rows, columns // 32, seed=layer)
            tensors[f"{name}_blocks"] = ("U8", list(blocks.shape), blocks.tobytes())
            tensors[f"{name}_scales"] = ("U8", list(scales.shape), scales.tobytes())
            wanted[name] = values(blocks, scales)
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj_bias"
        tensors[name] = ("F32", [EXPERTS, 2 * WIDTH], bytes(4 * EXPERTS * 2 * WIDTH))
    raw.store(folder / raw.SINGLE, tensors)
    return folder, wanted


def test_a_checkpoint_in_4_bits(quantized):
    folder, wanted = quantized
    checkpoint = Checkpoint.open(folder, read_config(folder))
    for name, rows in wanted.items():
        if name.endswith("gate_up_proj"):  # gate and up in turn
            rows = np.stack([rows[:, 0::2], rows[:, 1::2]], axis=1)
        assert checkpoint.names()[name].dtype == ml_dtypes.bfloat16
        found = checkpoint.read(name)
        assert (found.dtype, found.shape) == (ml_dtypes.bfloat16, rows.shape)
        np.testing.assert_array_equal(found.astype(np.float64), rows)
        np.testing.assert_array_equal(checkpoint.read(name, dtype=np.float32), rows)
        some = (slice(2, 5), *[slice(None)] * (rows.ndim - 2), slice(1, 30, 3))
        np.testing.assert_array_equal(checkpoint.read(name, some, dtype=np.float32), rows[some])


@pytest.mark.parametrize("part", ["blocks", "scales"])
@pytest.mark.parametrize("damage", ["type", "shape", "missing"])
def test_bad_blocks_are_refused(quantized, part, damage):
    folder, _ = quantized
    tensors = raw.load(folder / raw.SINGLE)
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    _, shape, data = tensors.pop(name)
    if damage == "type":
        tensors[name] = ("I8", shape, data)
    if damage == "shape":
        tensors[name] = ("U8", shape[::-1], data)
    raw.store(folder / raw.SINGLE, tensors)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder, read_config(folder))
    # Without blocks it is not in 4 bits.
    whole = name.removesuffix("_blocks")
    assert caught.value.key == (whole if (part, damage) == ("blocks", "missing") else name)


def test_rows_that_fill_no_block_are_refused(quantized):
    folder, _ = quantized
    edit_config(folder, hidden_size=40)
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder, read_config(folder))


@pytest.mark.parity
def test_transformers_finds_the_same():
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_blocks(3, 10, 2)
    wanted = mxfp4.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.bfloat16
    )  # [E, in, out]
    for expert in range(3):
        found = Mxfp4Matrix(blocks[expert], scales[expert])[:, :]
        np.testing.assert_array_equal(found, wanted[expert].T.float().numpy())
