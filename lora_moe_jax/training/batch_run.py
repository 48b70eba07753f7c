"""One batch through the model and back: packs, logprobs, losses, gradients by adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lora_moe_jax.adapters.bank import Place
from lora_moe_jax.training.datum import Row
from lora_moe_jax.training.loss_value import value_and_gradient
from lora_moe_jax.training.losses import Loss
from lora_moe_jax.training.masters import Masters
from lora_moe_jax.training.model_pass import KeptOfPieces, ModelPass, PlacedPack
from lora_moe_jax.training.optimizer import unset, with_gradients
from lora_moe_jax.training.packing import Pack, packs, places
from lora_moe_jax.training.pieces import FactorGradients


@dataclass(frozen=True)
class InTraining:
    """An adapter of the batch.

    Attributes:
      slot: where it is now.
      places: of the projections in its masters.
    """

    slot: int
    masters: Masters
    places: Mapping[str, Place]


@dataclass
class BatchRun:
    """The batch's results as they come.

    Attributes:
      logprobs: of each row, by its place in the batch.
      losses, gradients: by adapter.
    """

    model: ModelPass
    adapters: Mapping[str, InTraining]
    loss: Loss
    options: dict[str, np.float32]
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Masters] = field(default_factory=dict)

    def run(self, rows: Sequence[Row]) -> None:
        """Computes everything of all rows."""
        every = packs(rows, self.model.sizes[-1])
        for group in [[pack] for pack in every] if self.loss.by_sequence else [every]:
            self._run_group(group)

    def _run_group(self, group: list[Pack]) -> None:
        """Packs whose loss is one. What layers kept is used only if there is one pack."""
        for pack in group:
            placed = self._placed(pack)
            kept = self._forward(pack, placed)
        gradients = self._evaluate(group)
        for pack in group:
            if len(group) > 1:
                placed = self._placed(pack)
                kept = self._forward(pack, placed)
            self._backward(pack, placed, kept, gradients)

    def _placed(self, pack: Pack) -> PlacedPack:
        slots = {name: its.slot for name, its in self.adapters.items()}
        return self.model.placed(pack, slots)

    def _forward(self, pack: Pack, placed: PlacedPack) -> KeptOfPieces:
        flat, kept = self.model.forward(placed)
        flat = np.asarray(flat)
        for row, place in zip(pack.rows, places(pack), strict=True):
            self.logprobs[row.place] = flat[place]
        return kept

    def _evaluate(self, group: list[Pack]) -> dict[int, np.ndarray]:
        """Adds the group's losses; gives their gradients by each row's logprobs."""
        begun = {}
        for name in dict.fromkeys(name for pack in group for name in pack.pieces):
            rows = [row for pack in group for row in pack.pieces.get(name, [])]
            logprobs = [self.logprobs[row.place] for row in rows]
            begun[name] = value_and_gradient(self.loss, self.options, rows, logprobs)
        found: dict[int, np.ndarray] = {}
        for name, evaluated in begun.items():
            value, gradients = evaluated.read()
            self.losses[name] = self.losses.get(name, 0.0) + value
            found |= {row.place: one for row, one in zip(evaluated.rows, gradients, strict=True)}
        return found

    def _backward(
        self,
        pack: Pack,
        placed: PlacedPack,
        kept: KeptOfPieces,
        gradients: Mapping[int, np.ndarray],
    ) -> None:
        flat = np.zeros(placed.sizes.tokens, np.float32)
        for row, place in zip(pack.rows, places(pack), strict=True):
            flat[place] = gradients[row.place]
        first = [name for name in pack.pieces if name not in self.gradients]
        for name in first:
            self.gradients[name] = unset(self.adapters[name].masters)
        for of_slots in self.model.backward(placed, kept, flat):
            for name in pack.pieces:
                rank, slot = placed.slots.places[name]
                self._add(name, of_slots.get(rank, {}), slot, name in first)

    def _add(self, name: str, found: FactorGradients, slot: int, first: bool) -> None:
        """Adds an adapter's part of a piece's gradients, every piece of which has its own."""
        total, places = self.gradients[name], self.adapters[name].places
        wanted = {key: found[key] for key in found if key in places}
        if wanted:
            self.gradients[name] = with_gradients(
                total, wanted, places, np.int32(slot), first=first
            )
