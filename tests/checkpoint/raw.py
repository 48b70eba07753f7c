"""Safetensors files written by hand, so that tests can write what no library would."""

from __future__ import annotations

import json
from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# name -> (type, shape, data)
Tensors = dict[str, tuple[str, list[int], bytes]]


def load(path: Path) -> Tensors:
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8 : 8 + length]), blob[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def layout(tensors: Tensors) -> tuple[dict, bytes]:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    return header, b"".join(data for _, _, data in tensors.values())


def store_text(path: Path, header: str | bytes, data: bytes) -> None:
    header = header.encode() if isinstance(header, str) else header
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def store(path: Path, tensors: Tensors) -> None:
    header, data = layout(tensors)
    store_text(path, json.dumps(header), data)


def shard(folder: Path, count: int = 3) -> list[str]:
    """Turns the single file of a folder into shards with an index; returns their names."""
    tensors = load(folder / SINGLE)
    (folder / SINGLE).unlink()
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {}
    for number, file in enumerate(files):
        part = {name: tensors[name] for name in list(tensors)[number::count]}
        store(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return files
