"""Which safetensors files a model folder consists of, and which tensor is in which."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lora_moe_jax.checkpoint.safetensors_file import SafetensorsFile
from lora_moe_jax.errors import CheckpointError
from lora_moe_jax.strict_json import read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A plain name: no separator, so that an index cannot lead out of its folder.
_SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")


def open_folder(folder: str | os.PathLike) -> dict[str, SafetensorsFile]:
    """Maps each tensor name of the model in `folder` to the open file that has it.

    Raises:
      CheckpointError: there is no such model, a file is damaged, or the index and the shards
        disagree.
    """
    folder = Path(folder)
    if _exists(folder / SINGLE):
        # transformers prefers the single file where there are shards too. So what is loaded
        # here is what the reference loads.
        file = SafetensorsFile(folder / SINGLE)
        return dict.fromkeys(file.tensors, file)
    if _exists(folder / INDEX):
        return _open_shards(folder)
    pickled, shards = [], []
    if folder.is_dir():  # a path with a NUL is none, and cannot be searched
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin*"))
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
    hint = "pickled weights are never read: convert them to safetensors" if pickled else None
    if shards:
        hint = f"{INDEX}, which says where each tensor is, is missing: fetch or save it too"
    raise CheckpointError(
        "there are no weights that can be read",
        file=folder,
        expected=f"{SINGLE} or {INDEX}",
        found=", ".join((shards or pickled)[:8]) or "neither",
        hint=hint,
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as cause:  # e.g. a NUL in the path, or no permission
        raise CheckpointError("the folder cannot be read", file=path, found=str(cause)) from cause


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    index = folder / INDEX
    weight_map = _read_weight_map(index)
    located: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        file = SafetensorsFile(folder / shard)
        for name in file.tensors:
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    "a shard has a tensor that the index does not give to it",
                    file=file.path,
                    key=name,
                    expected=f"{INDEX} to name {shard}",
                    found=weight_map.get(name, "no entry"),
                    hint="the shards and the index are of different checkpoints: fetch them again",
                )
            located[name] = file
    for name, shard in weight_map.items():
        if name not in located:
            raise CheckpointError(
                "a tensor of the index is not in its shard",
                file=folder / shard,
                key=name,
                expected=f"the tensor that {INDEX} places here",
                found="no such tensor",
                hint="the shards and the index are of different checkpoints: fetch them again",
            )
    return located


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index has no weight map",
            file=index,
            key="weight_map",
            expected="an object of tensor name and shard",
            found=type(weight_map).__name__,
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(
                "a shard is not named as a file of this folder",
                file=index,
                key=name,
                expected="a plain name ending in .safetensors",
                found=repr(shard),
            )
    return weight_map
