"""The model's pass over a packed batch, forward and back.

Forward is what the engine runs, module by module, on the engine's own arrays: its logprobs have the
same bits. It keeps each piece's input, and of layers what products and attention made; the pass
back computes the rest again. So the rest is there for one layer at a time, and logits for a few
tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from lora_moe_jax.serving.model_arrays import ModelArrays
from lora_moe_jax.serving.progress import progress_bar
from lora_moe_jax.training.compiled import Program, compiled
from lora_moe_jax.training.pack_slots import PackSlots, pack_slots
from lora_moe_jax.training.packing import Pack, PackedBatch, PackSizes, packed, smallest
from lora_moe_jax.training.pieces import Kept, SlotGradients, pieces

KeptOfPieces = list[Kept]


class PlacedPack(NamedTuple):
    """A pack on the device."""

    sizes: PackSizes
    batch: PackedBatch
    slots: PackSlots


class ModelPass:
    """Both directions, for every size of batch; compiled when first used.

    Args:
      progress: show a bar on stderr while functions are compiled.

    Attributes:
      sizes: of batches, ascending.
    """

    def __init__(self, arrays: ModelArrays, sizes: Sequence[PackSizes], progress: bool):
        self.sizes, self._bank, self._progress = sizes, arrays.bank, progress
        self._pieces = pieces(arrays.on_base())
        self._programs: dict[PackSizes, dict[Hashable, Program]] = {}

    def placed(self, pack: Pack, slots: Mapping[str, int]) -> PlacedPack:
        """In the smallest size that holds it; with the bank's slots of its adapters."""
        size = smallest(pack, self.sizes)
        own = pack_slots(self._bank, {name: slots[name] for name in pack.pieces}, size.slots)
        batch, chosen = jax.device_put((packed(pack, size, own.numbers), own.chosen))
        return PlacedPack(size, batch, own._replace(chosen=chosen))

    def forward(self, pack: PlacedPack) -> tuple[jax.Array, KeptOfPieces]:
        """float32 logprobs [T] of each token's target, 0 where none is predicted."""
        programs = self._compiled(pack.sizes)
        x, kept = None, []
        for piece in self._pieces:
            arrays = piece.arrays(self._bank, pack.slots)
            x, its = programs[piece.key].forward(arrays, x, pack.batch)
            kept.append(its)
        return x, kept

    def choices(self, pack: PlacedPack) -> list[jax.Array]:
        """int32 [T, choices] of each layer that has a router: the experts of each token, the one it
        likes best first, found from the layer's input in the pass forward."""
        programs = self._compiled(pack.sizes)
        x, found = None, []
        for piece in self._pieces:
            arrays = piece.arrays(self._bank, pack.slots)
            if piece.functions.choices is not None:
                found.append(piece.functions.choices(arrays, x, pack.batch, pack.sizes))
            x, _ = programs[piece.key].forward(arrays, x, pack.batch)
        return found

    def backward(
        self, pack: PlacedPack, kept: KeptOfPieces, dlogprobs: jax.Array
    ) -> Iterator[SlotGradients]:
        """The gradients of the pack's slots, piece by piece; takes away what was kept."""
        dx = dlogprobs
        for piece in reversed(self._pieces):
            arrays = piece.arrays(self._bank, pack.slots)
            program = self._programs[pack.sizes][piece.key]
            gradients, dx = program.backward(arrays, kept.pop(), pack.batch, dx)
            yield piece.slot_gradients(gradients)

    def _compiled(self, sizes: PackSizes) -> dict[Hashable, Program]:
        if sizes not in self._programs:
            title = f"compiling for {sizes.tokens} tokens"
            with progress_bar(title, shown=self._progress) as bar:
                self._programs[sizes] = compiled(self._pieces, self._bank, sizes, bar.update)
        return self._programs[sizes]
