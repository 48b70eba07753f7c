"""Adapter folders written by hand, and comparison of adapters bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from lora_moe_jax.adapters import Adapter

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def save(folder: Path, tensors: dict[str, np.ndarray], **settings) -> Path:
    """Writes tensors and settings as they are given."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, folder / TENSORS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA"} | settings))
    return folder


def load(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    return load_file(folder / TENSORS), json.loads((folder / CONFIG).read_text())


def assert_same(expected: Adapter, found: Adapter, *, zero_pairs_added: bool = False) -> None:
    """Values, dtypes, scalings and ranks are equal; a shared factor equals its copies."""
    extra = found.pairs.keys() - expected.pairs.keys()
    assert not expected.pairs.keys() - found.pairs.keys()
    assert zero_pairs_added or not extra
    for name in extra:
        assert not found.pairs[name].a.any() and not found.pairs[name].b.any()
    for name, pair in expected.pairs.items():
        for field in ("a", "b", "scaling", "ranks"):
            x, y = getattr(pair, field), getattr(found.pairs[name], field)
            assert x.dtype == y.dtype, (name, field)
            assert x.shape[1:] == y.shape[1:], (name, field, x.shape, y.shape)
            x, y = np.broadcast_arrays(x, y)
            assert x.tobytes() == y.tobytes(), (name, field)
