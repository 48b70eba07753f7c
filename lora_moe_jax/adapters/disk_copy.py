"""An adapter whose factors are in a file in place of memory: there may be thousands.

The file has no name: nobody can change it, or cut it short under those who read it, and it is gone
with the adapter, or with the process. What was read of it lately is in the system's memory anyway.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace

import numpy as np

from lora_moe_jax.adapters.adapter import Adapter
from lora_moe_jax.errors import AdapterError, ConfigError

ALIGNMENT = 64  # bytes, of each array in the file


def check_folder(folder: str | os.PathLike) -> None:
    """Raises ConfigError if no file can be made in this folder."""
    try:
        with tempfile.TemporaryFile(dir=os.fspath(folder)):
            return
    except (OSError, TypeError, ValueError) as cause:  # a NUL in the path is a ValueError
        raise ConfigError(
            "no file can be made in the folder for copies of adapters",
            key="adapter_disk",
            expected="a folder that this process may write to",
            found=str(cause),
        ) from cause


def on_disk(adapter: Adapter, folder: str | os.PathLike) -> Adapter:
    """The same adapter with its factors in a file of its own in a folder.

    Raises:
      AdapterError: they cannot be written; nothing is left of them then.
    """
    arrays = [array for pair in adapter.pairs.values() for array in (pair.a, pair.b)]
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for array in arrays:
                file.write(_bytes(array))
                file.write(bytes(-array.nbytes % ALIGNMENT))
            file.flush()
            data = np.empty(0, np.uint8)
            if file.tell():
                # One map for all: a process may have some ten thousand.
                data = np.asarray(np.memmap(file, np.uint8, "r"))
    except OSError as cause:
        raise AdapterError(
            "the copy of an adapter cannot be written",
            file=folder,
            expected=f"room for {adapter.nbytes} bytes",
            found=str(cause),
            hint="unload adapters, or build the engine with another adapter_disk",
        ) from cause
    views = iter(_views(data, arrays))
    pairs = {
        name: replace(pair, a=next(views), b=next(views)) for name, pair in adapter.pairs.items()
    }
    return replace(adapter, pairs=pairs, on_disk=True)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _views(data: np.ndarray, arrays: list[np.ndarray]):
    """The arrays, of which `data` has the bytes one after the other."""
    start = 0
    for array in arrays:
        yield data[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        start += array.nbytes + -array.nbytes % ALIGNMENT
