"""Base weights in an adapter's file: PEFT saves embedding and head, and would load them too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lora_moe_jax.adapters.adapter import Adapter
from lora_moe_jax.errors import AdapterError
from lora_moe_jax.models.decoder import Decoder

ROWS = 4096  # that are compared at a time


def without_copies(adapter: Adapter, base: Decoder) -> Adapter:
    """The adapter, if its copies are the base's own weights.

    Raises:
      AdapterError: one has other values, rounded to the base's type: rows that were trained, or of
        another base.
    """
    for name, copy in adapter.base_copies.items():
        tied = base.lm_head.weight is None
        module = base.embed_tokens if tied or name.endswith("embed_tokens") else base.lm_head
        row = _first_other_row(copy, np.asarray(module.weight[...]))
        if row is not None:
            raise AdapterError(
                "the adapter comes with a base weight of its own, which differs from the base's",
                key=f"{name}.base_layer.weight",
                expected="the values of the base model",
                found=f"others, first in row {row}",
                hint="merge the adapter into its base model and load that; or remove the tensor, "
                "if the rows in which it differs mean nothing",
            )
    return replace(adapter, base_copies={})


def _first_other_row(copy: np.ndarray, weight: np.ndarray) -> int | None:
    for first in range(0, len(weight), ROWS):
        rows = slice(first, first + ROWS)
        differ = (copy[rows].astype(weight.dtype) != weight[rows]).any(axis=1)
        if differ.any():
            return first + int(differ.argmax())
    return None
