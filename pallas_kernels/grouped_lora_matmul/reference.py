"""The definition of `grouped_lora_matmul`, one row at a time in NumPy, for reading and testing."""

from __future__ import annotations

import numpy as np

from pallas_kernels.grouped_lora_matmul.lora import classes_of


def grouped_lora_matmul(x, w, group_sizes, row_slots=None, lora=(), *, parts=None, bias=None):
    """Same arguments and result as the public function, in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    parts = parts or (w.shape[1],)
    group_of_row = np.repeat(np.arange(len(group_sizes)), group_sizes)
    y = np.zeros((x.shape[0], w.shape[1]))
    for row, group in enumerate(group_of_row):
        y[row] = w[group] @ x[row]
        start = 0
        for width, entry in zip(parts, lora, strict=False):
            if entry is not None and row_slots[row] >= 0:
                pair, slot = _class_of(entry, int(row_slots[row]))
                y[row, start : start + width] += _delta(x[row], pair, slot, group)
            start += width
        if bias is not None:
            y[row] += np.asarray(bias[group], np.float64)
    return y


def _class_of(entry, slot):
    """The rank class that has a slot, and the slot's number in it."""
    for pair in classes_of(entry):
        if slot < len(pair.a):
            return pair, slot
        slot -= len(pair.a)
    raise IndexError("a row's slot is past those of the last rank class")


def _delta(x, pair, slot, group):
    a, b, scaling = (np.asarray(array, np.float64)[slot] for array in pair)
    a, b, scaling = (array[group if len(array) > 1 else 0] for array in (a, b, scaling))
    return scaling * (a @ x) @ b
