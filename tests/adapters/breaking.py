"""How the corpus of bad adapters breaks a good one: registration by decorators."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.adapters.tables import GOLDEN

SOURCES = GOLDEN / "deepseek_v3" / "adapters"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class Broken:
    source: str
    change: Callable[[Path], None]
    key: str
    says: tuple[str, ...]

    def __call__(self, folder: Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, TENSORS):
            shutil.copy(SOURCES / self.source / name, folder / name)
        self.change(folder)


CORPUS: dict[str, Broken] = {}


def bad(source: str = "per_expert", key: str = "", says: tuple[str, ...] = ()):
    """Registers a function that breaks a copy of the golden adapter `source`."""

    def register(function):
        CORPUS[function.__name__] = Broken(source, function, key, says)
        return function

    return register


def bad_config(name: str, key: str, says: tuple[str, ...] = (), source="per_expert", **settings):
    """Registers an adapter whose config has these settings; `...` removes one."""

    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text()) | settings
        config = {k: v for k, v in config.items() if v is not ...}
        (folder / CONFIG).write_text(json.dumps(config))

    CORPUS[name] = Broken(source, change, key, says)


def bad_text(name: str, text: str | bytes, key: str = "", says: tuple[str, ...] = ()):
    """Registers an adapter whose config file is `text`."""
    data = text.encode() if isinstance(text, str) else text
    CORPUS[name] = Broken("attn", lambda folder: (folder / CONFIG).write_bytes(data), key, says)


def bad_tensors(source: str = "per_expert", key: str = "", says: tuple[str, ...] = ()):
    """Registers a function that changes the dictionary of tensors."""

    def register(function):
        def change(folder: Path) -> None:
            tensors = load_file(folder / TENSORS)
            function(tensors)
            save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / TENSORS)

        CORPUS[function.__name__] = Broken(source, change, key, says)
        return function

    return register


def bad_header(key: str = "", says: tuple[str, ...] = (), source: str = "attn"):
    """Registers a function of (header, data) that returns a new header, as object or text, and
    new data."""

    def register(function):
        def change(folder: Path) -> None:
            raw = (folder / TENSORS).read_bytes()
            (size,) = struct.unpack("<Q", raw[:8])
            header, data = function(json.loads(raw[8 : 8 + size]), raw[8 + size :])
            text = header if isinstance(header, str) else json.dumps(header)
            (folder / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)

        CORPUS[function.__name__] = Broken(source, change, key, says)
        return function

    return register
