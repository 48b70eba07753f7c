"""The most likely tokens of a step's rows, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TopRows(NamedTuple):
    """What a step says of its rows' most likely tokens: int32 and float32 [rows, K]."""

    ids: np.ndarray
    logprobs: np.ndarray

    def pairs(self, row: int, count: int) -> list[tuple[int, float]]:
        """(token id, logprob) of the `count` most likely tokens of a row."""
        ids, logprobs = self.ids[row, :count], self.logprobs[row, :count]
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))
