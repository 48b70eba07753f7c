"""A safetensors file whose header has been checked before anything is read from it.

The safetensors library accepts duplicate names, reports damage in its own words, and in some
versions does not read bfloat16 into NumPy. The format is a length, a JSON header, and the data:
reading it here gives every refusal the file, the tensor, what was expected and what was found.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from lora_moe_jax.adapters.strict_json import parse_object
from lora_moe_jax.errors import AdapterError

_MAX_HEADER = 100_000_000  # the safetensors format's own limit
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}
_DAMAGED = "the file is damaged or was not written completely; copy or save it again"


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of one tensor: dtype as the format spells it ("BF16"), shape, and where
    its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """An open safetensors file. `tensors` maps names to `TensorInfo`, in file order.

    Raises `AdapterError` for anything that is not a whole, well-formed safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = file.read(8)
                length = int.from_bytes(header, "little")
                if len(header) < 8 or length > min(_MAX_HEADER, size - 8):
                    raise self._damaged(
                        expected=f"a header that fits the file's {size} bytes",
                        found=f"{len(header)} bytes" if len(header) < 8 else f"{length} bytes",
                    )
                data = file.read(length)
        except OSError as error:
            raise AdapterError("the file cannot be read", file=path, found=error) from error
        entries = parse_object(data, path, "the safetensors header")
        self.metadata = self._metadata(entries.pop("__metadata__", {}))
        self.tensors = self._check_entries(entries, size - 8 - length)
        try:
            whole = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: it has shrunk meanwhile
            raise self._damaged(found=error) from error
        self._data = whole[8 + length :]

    def read(
        self, name: str, expert_of: Callable[[tuple[int, ...]], int] | None = None
    ) -> np.ndarray:
        """A copy of the tensor, F32, F16 or BF16. Raises if a value is not finite; `expert_of`
        tells the error which expert an index of a packed tensor belongs to."""
        info = self.tensors[name]
        data = self._data[info.begin : info.end].view(FLOATS[info.dtype])
        tensor = np.array(data).reshape(info.shape)
        if not self._all_finite(tensor, info.dtype):
            index = tuple(int(i) for i in np.argwhere(~np.isfinite(tensor))[0])
            owner = "" if expert_of is None else f", of expert {expert_of(index)}"
            raise AdapterError(
                "a value is not finite",
                file=self.path,
                key=name,
                expected="finite values only",
                found=f"{tensor[index]} at index {list(index)}{owner}",
                hint="the adapter's training diverged or the file is damaged",
            )
        return tensor

    @staticmethod
    def _all_finite(tensor: np.ndarray, dtype: str) -> bool:
        if dtype == "F32":
            return bool(np.isfinite(tensor).all())
        exponent = np.uint16(_EXPONENT[dtype])  # many times faster than isfinite of bfloat16
        return bool(((tensor.view(np.uint16) & exponent) != exponent).all())

    def _damaged(self, **details: object) -> AdapterError:
        return AdapterError(
            "this is not a complete safetensors file", file=self.path, hint=_DAMAGED, **details
        )

    def _metadata(self, metadata: object) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._damaged(key="__metadata__", expected="an object of strings")
        return metadata

    def _check_entries(self, entries: dict, data_bytes: int) -> dict[str, TensorInfo]:
        tensors, spans = {}, []
        for name, entry in entries.items():
            info = self._check_entry(name, entry)
            tensors[name] = info
            spans.append((info.begin, info.end, name))
        position = 0
        for begin, end, name in sorted(spans):
            if begin != position:
                raise self._damaged(
                    key=name,
                    expected=f"data that begins at {position}, where the previous tensor ends",
                    found=f"{begin}, which {'overlaps' if begin < position else 'leaves a hole'}",
                )
            position = end
        if position != data_bytes:
            raise self._damaged(
                expected=f"{position} bytes of tensor data", found=f"{data_bytes} bytes"
            )
        return tensors

    def _check_entry(self, name: str, entry: object) -> TensorInfo:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._damaged(
                key=name,
                expected="an entry with dtype, shape and data_offsets",
                found=str(entry)[:200],
            )
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise AdapterError(
                "a tensor has a dtype that is not known",
                file=self.path,
                key=name,
                expected="one of " + ", ".join(FLOATS),
                found=dtype,
            )
        if not _is_sizes(shape) or len(shape) > 8:
            raise self._damaged(
                key=name, expected="a shape of at most 8 sizes", found=str(shape)[:200]
            )
        if not _is_sizes(offsets) or len(offsets) != 2:
            raise self._damaged(key=name, expected="two data_offsets", found=str(offsets)[:200])
        begin, end = offsets
        expected = math.prod(shape) * _BITS[dtype] // 8
        if end - begin != expected:
            raise self._damaged(
                key=name,
                expected=f"{expected} bytes for {dtype} {shape}",
                found=f"{end - begin} bytes (data_offsets {offsets})",
            )
        return TensorInfo(dtype, tuple(shape), begin, end)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
