"""Writes a model folder in the layout of the Hugging Face hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from lora_moe_jax.checkpoint.folder import INDEX, SINGLE
from lora_moe_jax.checkpoint.interleaved import to_file
from lora_moe_jax.checkpoint.names import (
    expected_tensors,
    is_interleaved,
    is_stacked,
    per_expert_names,
)
from lora_moe_jax.checkpoint.safetensors_file import FLOAT_DTYPES
from lora_moe_jax.checkpoint.to_disk import to_disk
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.writer import to_json_dict
from lora_moe_jax.errors import CheckpointError

_TYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


def write_checkpoint(
    folder: str | os.PathLike,
    config: ModelConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    max_shard_bytes: int = 4 * 10**9,
) -> None:
    """Writes config.json and the weights: one file, or shards with an index if they are larger.

    The folder appears complete or not at all. At most one shard is held in memory.

    Args:
      folder: a folder that does not exist yet, or is empty.
      config: what the tensors are checked against.
      tensors: every tensor of the model once, by canonical name (`checkpoint.names`), float32,
        bfloat16 or float16, in any order.
      max_shard_bytes: a shard has at most this much data, unless one tensor alone has more.

    Raises:
      CheckpointError: the folder has something in it or cannot be written; or a tensor is
        missing, unknown, given twice, or has a wrong shape or type.
    """
    folder = Path(folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                "the folder has something in it", file=folder, expected="a new or empty folder"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write_files(scratch, config, _checked(tensors, config), max_shard_bytes)
            to_disk(scratch)
            scratch.chmod(0o755)  # mkdtemp keeps others out
            os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        raise CheckpointError(
            "the checkpoint cannot be written", file=folder, found=str(cause)
        ) from cause


def _checked(
    tensors: Iterable[tuple[str, np.ndarray]], config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in the layout of the hub; raises when one is wrong, and at the end if missing."""
    missing = expected_tensors(config)
    seen = set()
    for name, tensor in tensors:
        if name not in missing:
            found = "it a second time" if name in seen else "an unknown name"
            raise CheckpointError(
                "a tensor is not part of the model", key=name, expected="each once", found=found
            )
        shape = missing.pop(name)
        seen.add(name)
        if tensor.shape != shape or tensor.dtype not in _TYPE_NAMES:
            raise CheckpointError(
                "a tensor has a wrong shape or type",
                key=name,
                expected=f"{list(shape)}, {' or '.join(FLOAT_DTYPES)}",
                found=f"{list(tensor.shape)}, {tensor.dtype}",
            )
        yield from _hub_tensors(name, np.asarray(tensor), config)
    if missing:
        raise CheckpointError(
            "tensors are missing", key=min(missing), found=f"{len(missing)} not given"
        )


def _hub_tensors(
    name: str, tensor: np.ndarray, config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    if is_interleaved(name, config):
        yield name, to_file(name, tensor)
        return
    if not is_stacked(name):
        yield name, tensor
        return
    for names, expert in zip(per_expert_names(name, len(tensor)), tensor, strict=True):
        pieces = expert if expert.ndim == 3 else (expert,)
        yield from zip(names, pieces, strict=True)


def _write_files(
    folder: Path,
    config: ModelConfig,
    tensors: Iterator[tuple[str, np.ndarray]],
    max_shard_bytes: int,
) -> None:
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    size = total = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            _write_safetensors(folder / f"{len(shards)}.part", shard)
            shards.append(list(shard))
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    _write_safetensors(folder / f"{len(shards)}.part", shard)
    shards.append(list(shard))
    _name_shards(folder, shards, total)
    _write_json(folder / "config.json", to_json_dict(config))


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Gives the parts their names, which say how many there are, and writes the index."""
    if len(shards) == 1:
        (folder / "0.part").rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(
        folder / INDEX,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    # Wide types first, as the safetensors library does it, so that all data are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _TYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            # As bytes: not every NumPy type has a buffer interface.
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
