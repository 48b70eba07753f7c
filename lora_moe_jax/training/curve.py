"""A curve as one line of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Blocks from the smallest of the values to the largest; means, where there are many."""
    if not len(values):
        return ""
    parts = np.array_split(np.asarray(values, np.float64), min(width, len(values)))
    means = np.array([part.mean() for part in parts])
    finite = means[np.isfinite(means)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BLOCKS[round((mean - low) * scale)] if np.isfinite(mean) else " " for mean in means
    )
