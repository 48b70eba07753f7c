"""What the host tells a step, as one int32 array: it goes to the device in one copy, or not at all
where it follows from the step before (`advanced`).

First what differs with every step, three numbers for each token of the flat batch; then a part for
the rows, that is for the requests that run, most of which stays from a request's start to its end.
The host keeps the second part as it lies in the array, so that packing is one concatenation; the
step takes slices. Floats and seeds are carried bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# In place of a token that the host does not know yet: the last one sampled for the token's row.
FED_BACK = -1


class RowInputs(NamedTuple):
    """One entry for each row, NumPy or JAX.

    Attributes:
      sample_at: int32 [B], the place in the batch after which the row's next token is sampled;
        -1: none is.
      step: int32 [B], how many tokens the row's request has generated before that.
      slots: int32 [B], the adapter slot; -1 for the base model.
      temperature, top_p, min_p: float32 [B]; top_k: int32 [B]; seed: uint32 [B].
      page_tables: int32 [B, pages], the pages of the row's request in position order.
    """

    sample_at: Any
    step: Any
    slots: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    page_tables: Any


class StepInputs(NamedTuple):
    """All that a step takes.

    Attributes:
      tokens: int32 [T], or FED_BACK; positions: int32 [T].
      request: int32 [T], the row of each token; -1 for padding.
      rows: the rows' part.
    """

    tokens: Any
    positions: Any
    request: Any
    rows: RowInputs


_DTYPES = dict.fromkeys(RowInputs._fields, np.int32) | {
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.uint32,
}


@dataclass(frozen=True)
class StepLayout:
    """Where things lie, for B rows with page tables of some length; the same for every T."""

    rows: int
    pages_per_request: int

    @property
    def row_size(self) -> int:
        """Numbers of the rows' part."""
        return self.rows * (len(RowInputs._fields) - 1 + self.pages_per_request)

    def size(self, tokens: int) -> int:
        """Numbers of the whole array for a batch of T tokens."""
        return 3 * tokens + self.row_size

    def row_values(self, part) -> RowInputs:
        """The fields of a rows' part int32 [row_size]; of a NumPy array they are views."""
        values, start = [], 0
        for name, dtype in _DTYPES.items():
            shape = (self.rows,)
            if name == "page_tables":
                shape = (self.rows, self.pages_per_request)
            end = start + math.prod(shape)
            values.append(part[start:end].view(dtype).reshape(shape))
            start = end
        return RowInputs(*values)

    def pack(self, tokens, positions, request, row_part) -> np.ndarray:
        """int32 [size(T)], new: a step that has not begun may still read an earlier one."""
        return np.concatenate((tokens, positions, request, row_part))

    def unpack(self, packed) -> StepInputs:
        """What was packed, of a NumPy array or inside a compiled function."""
        tokens = (packed.shape[0] - self.row_size) // 3
        flat = [packed[i * tokens : (i + 1) * tokens] for i in range(3)]
        return StepInputs(*flat, self.row_values(packed[3 * tokens :]))

    def repack(self, inputs: StepInputs) -> jax.Array:
        """int32 [size(T)] of what was unpacked, inside a compiled function."""
        return jnp.concatenate([x.view(jnp.int32).ravel() for x in jax.tree.leaves(inputs)])


def advanced(inputs: StepInputs) -> StepInputs:
    """One token for each row, a step later: each token is the one that its row was given."""
    real, rows = inputs.request >= 0, inputs.rows
    return inputs._replace(
        tokens=jnp.where(real, FED_BACK, inputs.tokens),
        positions=inputs.positions + real,
        rows=rows._replace(step=rows.step + (rows.sample_at >= 0)),
    )


def split_chosen(chosen: np.ndarray) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and logprobs, each [steps][rows], of what a step gives: int32 [steps, 2, rows]."""
    return chosen[:, 0].tolist(), chosen[:, 1].view(np.float32).tolist()
