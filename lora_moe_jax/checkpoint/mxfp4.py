"""MXFP4: 32 numbers of 4 bits (sign, two of exponent, one of mantissa) and their power of two.

A byte of a block has two numbers, the lower half first. A scale of 127 stands for one.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

BYTES = 16  # of a block
NUMBERS = 2 * BYTES
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])
# Of each byte, both in one number: NumPy finds these several times as fast as pairs.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1).view(np.uint64)[:, 0]
_POWERS = np.ldexp(np.float32(1), np.arange(255) - 127)
_POWERS = np.append(_POWERS, np.float32(np.nan))  # the format's number for that


class Mxfp4Matrix:
    """A matrix whose rows are blocks: a part of it is made when that is asked for.

    Attributes:
      blocks: uint8 [rows, columns / NUMBERS, BYTES].
      scales: uint8 [rows, columns / NUMBERS].
      dtype: bfloat16, which has all of its values.
    """

    dtype = np.dtype(ml_dtypes.bfloat16)

    def __init__(self, blocks: np.ndarray, scales: np.ndarray):
        self.blocks, self.scales = blocks, scales

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """float32 values of some rows and columns."""
        rows, columns = index
        scales = self.scales[rows]
        values = _PAIRS[self.blocks[rows]].view(np.float32).reshape(*scales.shape, NUMBERS)
        with np.errstate(over="ignore"):  # infinities are the file's own
            values *= _POWERS[scales][..., None]
        return values.reshape(len(values), -1)[:, columns]
