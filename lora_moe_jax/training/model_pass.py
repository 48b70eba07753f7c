"""The model's pass over a packed batch, forward and back.

Forward is what the engine runs, module by module, on the engine's own arrays: its logprobs have the
same bits. It keeps each piece's input and nothing else; the pass back computes a piece again from
its input. So one layer's intermediate results are there at a time, and a few tokens' logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from lora_moe_jax.serving.model_arrays import ModelArrays
from lora_moe_jax.training.packing import PackedBatch, PackSizes
from lora_moe_jax.training.pieces import SlotGradients, pieces

Inputs = list[jax.Array | None]  # of every piece; the embedding's are the tokens


class ModelPass:
    """Both directions, for every size of batch; compiled when first used."""

    def __init__(self, arrays: ModelArrays):
        self._bank = arrays.bank
        self._pieces = pieces(arrays.merge(arrays.base, arrays.bank_leaves()))

    def forward(self, sizes: PackSizes, batch: PackedBatch) -> tuple[jax.Array, Inputs]:
        """float32 logprobs [T] of each token's target, 0 where none is predicted."""
        x, inputs = None, []
        for piece in self._pieces:
            inputs.append(x)
            x = piece.forward(self._bank, x, batch, sizes)
        return x, inputs

    def backward(
        self, sizes: PackSizes, batch: PackedBatch, inputs: Inputs, dlogprobs: jax.Array
    ) -> Iterator[SlotGradients]:
        """The gradients of every slot's factors, piece by piece; takes the inputs away."""
        dx = dlogprobs
        for piece in reversed(self._pieces):
            gradients, dx = piece.backward(self._bank, inputs.pop(), batch, sizes, dx)
            yield gradients
