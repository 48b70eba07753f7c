"""One safetensors file: its header, fully checked, and its tensors, copied or as views of a map.

A mapped file must stay as it is: whoever reads a view past its new end is killed (SIGBUS). So what
others may be writing while a server runs is copied with `read`.

The format is an 8-byte little-endian header length, a JSON header, and the data:
`{"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {...}}`.
The library `safetensors` reads it too, but says neither which tensor is wrong nor accepts
bfloat16 slices for NumPy, and keeps the last of two equal keys.
"""

from __future__ import annotations

import math
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from lora_moe_jax.errors import CheckpointError, LoraMoeError
from lora_moe_jax.strict_json import DAMAGED, parse_json_object

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_NDIM = 8
# Every type of the format, with its bits; NUMPY_DTYPES are those that `view` can return.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
NUMPY_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
# What weights and adapters may be stored in.
FLOAT_DTYPES = {name: NUMPY_DTYPES[name] for name in ("F32", "BF16", "F16")}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header has it: type name, shape, and its bytes counted from the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """An open safetensors file whose header is known to be sound.

    Attributes:
      path: the file.
      metadata: the text entries of the header.
      tensors: every tensor of the file by name, in the order of the header.
    """

    def __init__(self, path: str | os.PathLike, error: type[LoraMoeError] = CheckpointError):
        """Reads and checks the header and maps the file; no tensor data are read.

        Raises:
          error: the file cannot be read, is truncated, or its header is damaged.
        """
        self.path = Path(path)
        self._error = error
        try:
            if not self.path.is_file():  # a folder; or a pipe, which would block
                raise self._refuse(
                    "the file cannot be read",
                    "a safetensors file",
                    "no file of this name",
                    hint=None,
                )
            self._file = open(self.path, "rb")
            weakref.finalize(self, self._file.close)
            self._state = self._now()
            size = self._state[0]
            header = self._read_header(self._file, size)
            self._bytes = np.memmap(self._file, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as cause:  # ValueError: a NUL in the path, or an empty file
            raise self._refuse("the file cannot be read", found=cause, hint=None) from cause
        self._data_start = 8 + len(header)
        entries = parse_json_object(header, self.path, error)
        self.metadata = self._check_metadata(entries.pop("__metadata__", {}))
        self.tensors = {name: self._check_entry(name, entry) for name, entry in entries.items()}
        self._check_layout(size - self._data_start)

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file, read when it is used.

        The view may be unaligned, as the format does not align its data.

        Raises:
          error: there is no such tensor, or NumPy has no such type.
        """
        tensor, dtype = self._find(name)
        start = self._data_start + tensor.start
        return np.ndarray(tensor.shape, dtype, buffer=self._bytes, offset=start)

    def read(self, name: str) -> np.ndarray:
        """A copy of the tensor, read from the file.

        Raises:
          error: as `view`; or the file has become shorter or cannot be read any more.
        """
        tensor, dtype = self._find(name)
        data = np.empty(tensor.stop - tensor.start, np.uint8)
        try:
            self._file.seek(self._data_start + tensor.start)
            count = self._file.readinto(data)
        except OSError as cause:
            raise self._refuse("the file cannot be read", found=cause, key=name) from cause
        if count < len(data):
            raise self._changed(f"{count} bytes of {len(data)}", name)
        return data.view(dtype).reshape(tensor.shape)

    def check_unchanged(self) -> None:
        """After reading: raises `error` if somebody has written the file meanwhile."""
        if self._now() != self._state:
            raise self._changed("another size or time of writing")

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns

    def _changed(self, found: str, key: str | None = None) -> LoraMoeError:
        expected, hint = "the file as it was when it was opened", "try again when it is complete"
        return self._refuse("the file was changed while it was read", expected, found, key, hint)

    def _find(self, name: str) -> tuple[StoredTensor, np.dtype]:
        tensor = self.tensors.get(name)
        found = tensor.dtype if tensor else "no such tensor"
        if found not in NUMPY_DTYPES:
            expected = ", ".join(NUMPY_DTYPES)
            raise self._refuse("a tensor cannot be read", expected, found, name, hint=None)
        return tensor, NUMPY_DTYPES[tensor.dtype]

    def _refuse(
        self,
        message: str,
        expected: object = "a complete safetensors file",
        found: object = None,
        key: str | None = None,
        hint: str | None = DAMAGED,
    ) -> LoraMoeError:
        return self._error(
            message,
            file=self.path,
            key=None if key is None else key[:200],
            expected=expected,
            found=None if found is None else str(found)[:200],
            hint=hint,
        )

    def _read_header(self, file, size: int) -> bytes:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise self._refuse("the file is too short", found=f"{size} bytes")
        if prefix == b"version ":
            raise self._refuse("the file is a Git LFS pointer", hint="fetch it with git lfs pull")
        length = int.from_bytes(prefix, "little")
        limit = min(size - 8, MAX_HEADER_BYTES)
        if length > limit:
            expected = f"a header of at most {limit} bytes"
            raise self._refuse("the header is longer than the file can hold", expected, length)
        header = file.read(length)
        if not header.startswith(b"{"):
            raise self._refuse("the header is not JSON", "a JSON object", repr(header[:16]))
        return header

    def _check_metadata(self, metadata: object) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            raise self._refuse(
                "the metadata are not text", "an object of strings", key="__metadata__"
            )
        return metadata

    def _check_entry(self, name: str, entry: object) -> StoredTensor:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._refuse(
                "a header entry is malformed",
                "exactly dtype, shape and data_offsets",
                sorted(entry) if isinstance(entry, dict) else type(entry).__name__,
                name,
            )
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            expected = "one of " + ", ".join(DTYPE_BITS)
            raise self._refuse("a data type is not known", expected, repr(dtype), name)
        if not _are_sizes(shape) or len(shape) > MAX_NDIM:
            expected = f"at most {MAX_NDIM} sizes"
            raise self._refuse("a shape is malformed", expected, repr(shape), name)
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            expected = "a start and a stop"
            raise self._refuse("the data_offsets are malformed", expected, repr(offsets), name)
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        if bits != 8 * (offsets[1] - offsets[0]):
            raise self._refuse(
                "the size of the data is not that of the shape",
                f"{bits / 8:g} bytes for {dtype} {shape}",
                f"{offsets[1] - offsets[0]} bytes",
                name,
            )
        return StoredTensor(dtype, tuple(shape), *offsets)

    def _check_layout(self, size: int) -> None:
        """The tensors must cover the data exactly: no overlap, no hole, nothing beyond."""
        end = 0
        # By start and stop, as an empty tensor may start where the next one does.
        order = sorted(self.tensors.items(), key=lambda item: (item[1].start, item[1].stop))
        for name, tensor in order:
            if tensor.stop > size:
                raise self._refuse(
                    "the data of a tensor are beyond the end of the file: it is truncated",
                    f"at most {size} bytes of data",
                    f"offsets {tensor.start} to {tensor.stop}",
                    name,
                )
            if tensor.start != end:
                kind = "overlap" if tensor.start < end else "leave a hole after"
                message = f"the data of a tensor {kind} those of the one before"
                raise self._refuse(message, f"start {end}", f"start {tensor.start}", name)
            end = tensor.stop
        if end != size:
            message = "there are bytes after the last tensor"
            raise self._refuse(message, f"{end} bytes of data", f"{size} bytes")


def _are_sizes(value: object) -> bool:
    """Whether the value is a list of sizes, small enough to be sizes in memory."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**48 for item in value
    )
