"""The model's pass over a packed batch, forward and back.

Forward is what the engine runs, module by module, on the engine's own arrays: its logprobs have the
same bits. It keeps each piece's input, and of layers what products and attention made; the pass
back computes the rest again. So the rest is there for one layer at a time, and logits for a few
tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import jax

from lora_moe_jax.serving.model_arrays import ModelArrays
from lora_moe_jax.training.compiled import Program, compiled
from lora_moe_jax.training.packing import PackedBatch, PackSizes
from lora_moe_jax.training.pieces import Kept, SlotGradients, pieces

KeptOfPieces = list[Kept]


class ModelPass:
    """Both directions, for every size of batch; compiled when first used."""

    def __init__(self, arrays: ModelArrays):
        self._bank = arrays.bank
        self._pieces = pieces(arrays.on_base())
        self._programs: dict[PackSizes, dict[Hashable, Program]] = {}

    def forward(self, sizes: PackSizes, batch: PackedBatch) -> tuple[jax.Array, KeptOfPieces]:
        """float32 logprobs [T] of each token's target, 0 where none is predicted."""
        programs = self._compiled(sizes, batch)
        x, kept = None, []
        for piece in self._pieces:
            x, its = programs[piece.key].forward(piece.arrays(self._bank), x, batch)
            kept.append(its)
        return x, kept

    def choices(self, sizes: PackSizes, batch: PackedBatch) -> list[jax.Array]:
        """int32 [T, choices] of each layer that has a router: the experts of each token, the one it
        likes best first, found from the layer's input in the pass forward."""
        programs = self._compiled(sizes, batch)
        x, found = None, []
        for piece in self._pieces:
            arrays = piece.arrays(self._bank)
            if piece.functions.choices is not None:
                found.append(piece.functions.choices(arrays, x, batch, sizes))
            x, _ = programs[piece.key].forward(arrays, x, batch)
        return found

    def backward(
        self, sizes: PackSizes, batch: PackedBatch, kept: KeptOfPieces, dlogprobs: jax.Array
    ) -> Iterator[SlotGradients]:
        """The gradients of every slot's factors, piece by piece; takes away what was kept."""
        dx = dlogprobs
        for piece in reversed(self._pieces):
            program = self._programs[sizes][piece.key]
            gradients, dx = program.backward(piece.arrays(self._bank), kept.pop(), batch, dx)
            yield piece.slot_gradients(gradients)

    def _compiled(self, sizes: PackSizes, batch: PackedBatch) -> dict[Hashable, Program]:
        if sizes not in self._programs:
            self._programs[sizes] = compiled(self._pieces, self._bank, sizes, batch)
        return self._programs[sizes]
