"""The experts of gpt-oss in files: [expert, in, out], with gate and up in turn along the last axis.

    gate_up_proj       [E, H, 2I]   canonical [E, 2, I, H]
    gate_up_proj_bias  [E, 2I]      canonical [E, 2, I]
    down_proj          [E, I, H]    canonical [E, H, I]
    down_proj_bias     [E, H]       as it is

or, in place of a weight, 4-bit blocks and scales: see `checkpoint.mxfp4`.
"""

from __future__ import annotations

import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"


def file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in files of a canonical tensor."""
    experts, *rest = shape
    rest = rest[::-1]
    if _has_both(name):
        *rest, inner, two = rest
        rest = [*rest, inner * two]
    return (experts, *rest)


def from_file(name: str, tensor: np.ndarray) -> np.ndarray:
    """The canonical form of a file's tensor, a view."""
    if _has_both(name):
        tensor = tensor.reshape(*tensor.shape[:-1], -1, 2)
    return _backwards(tensor)


def to_file(name: str, tensor: np.ndarray) -> np.ndarray:
    """The inverse of `from_file`."""
    tensor = _backwards(tensor)
    return tensor.reshape(*tensor.shape[:-2], -1) if _has_both(name) else tensor


def rows_of_pieces(name: str) -> tuple[slice, ...]:
    """Which rows of an expert's [out, in] are gate's and up's, or all of them down's."""
    return (slice(0, None, 2), slice(1, None, 2)) if _has_both(name) else (slice(None),)


def _backwards(tensor: np.ndarray) -> np.ndarray:
    """With all axes but the first in the other order."""
    return tensor.transpose(0, *range(tensor.ndim - 1, 0, -1))


def _has_both(name: str) -> bool:
    return ".gate_up_proj" in name
