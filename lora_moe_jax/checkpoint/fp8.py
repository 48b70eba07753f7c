"""FP8 weights with a scale for each block of 128 x 128, as DeepSeek-V3's and Qwen3's checkpoints.

    W[i, j] = weight[i, j] · weight_scale_inv[i // 128, j // 128]

The name says the inverse, and it is multiplied. Blocks at the ends may be smaller.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from lora_moe_jax.config.reader import FP8_BLOCK as BLOCK

SCALES = "_scale_inv"  # behind the name of the weight
WEIGHT_DTYPES = ("F8_E4M3",)
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class Fp8Matrix:
    """A matrix of which a part is made when that is asked for.

    Attributes:
      weight: uint8 [rows, columns], the bits of numbers of E4M3.
      scales: float32 [blocks of rows, blocks of columns].
      dtype: float32, as products with scales are rounded once, where they go.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, weight: np.ndarray, scales: np.ndarray):
        self.weight, self.scales = weight, scales

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """float32 values of some rows and columns."""
        sizes = zip(index, self.weight.shape, strict=True)
        rows, columns = (np.arange(size)[its] // BLOCK for its, size in sizes)
        values = _VALUES[self.weight[index]]
        with np.errstate(over="ignore"):  # infinities are the file's own
            values *= self.scales[:, columns][rows]
        return values


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a weight of this shape."""
    return tuple(-(-size // BLOCK) for size in shape)
