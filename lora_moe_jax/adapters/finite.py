"""Reads a tensor of an adapter, and refuses values that are not finite."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lora_moe_jax.checkpoint.safetensors_file import SafetensorsFile
from lora_moe_jax.errors import AdapterError

# The bits of a 16-bit float that are all set in NaN and infinities, and in nothing else.
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}


def read_finite(
    file: SafetensorsFile, name: str, expert_of: Callable[[tuple[int, ...]], int] | None = None
) -> np.ndarray:
    """A copy of the F32, F16 or BF16 tensor.

    Args:
      expert_of: tells the error which expert an index of a packed tensor belongs to.

    Raises:
      AdapterError: a value is not finite, or the file is not what it was any more.
    """
    tensor = file.read(name)
    if not _all_finite(tensor, file.tensors[name].dtype):
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(tensor))[0])
        owner = "" if expert_of is None else f", of expert {expert_of(index)}"
        raise AdapterError(
            "a value is not finite",
            file=file.path,
            key=name,
            expected="finite values only",
            found=f"{tensor[index]} at index {list(index)}{owner}",
            hint="the adapter's training diverged or the file is damaged",
        )
    return tensor


def _all_finite(tensor: np.ndarray, dtype: str) -> bool:
    if dtype == "F32":
        return bool(np.isfinite(tensor).all())
    exponent = np.uint16(_EXPONENT[dtype])  # many times faster than isfinite of bfloat16
    return bool(((tensor.view(np.uint16) & exponent) != exponent).all())
