"""The experts of very few tokens, chosen in the kernel that runs them.

A kernel for the choice and one for the tables of its rows are a launch each, and hardly more. Here
every program finds the experts of all tokens, which takes less: none waits for another.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_rows import place_of
from pallas_kernels.hopper.dependent_launch import begins_early, wait_for_kernels_before
from pallas_kernels.hopper.rehearsal import rehearsed
from pallas_kernels.top_experts.mosaic_gpu import Choice, load_numbers
from pallas_kernels.top_experts.xla import Scoring


class ChoiceLayout(NamedTuple):
    """Sizes of the choice.

    Attributes:
      experts: how many there are. programs: of the kernel.
    """

    tokens: int
    experts: int
    top_k: int
    scoring: Scoring
    programs: int

    def results(self):
        """Experts and weights."""
        shape = self.tokens, self.top_k
        return [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)]

    def scratch(self):
        rows = (self.tokens * self.top_k,)
        words, scores = plgpu.SMEM(rows, jnp.int32), plgpu.SMEM(rows, jnp.float32)
        return dict(words=words, scores=scores, chosen=plgpu.Barrier())


class ChosenRows:
    """What one program does for its rows.

    Args:
      arrays: references to logits, tokens and correction, see `gpu_experts.Logits`, and to the
        experts and weights that are results.
      words, scores: of all rows, in shared memory. chosen: the barrier of the words.
    """

    def __init__(self, layout: ChoiceLayout, program, arrays, words, scores, chosen):
        self.layout, self.program = layout, program
        self.stores = program == layout.programs - 1  # it has least to do
        self.logits, self.tokens, self.correction, self.experts, self.weights = arrays
        self.words, self.scores, self.chosen = words, scores, chosen

    def make(self):
        """For the warpgroup that multiplies, which waits for the kernels before."""
        tokens = self.layout.tokens
        bias = None if self.correction is None else load_numbers(self.correction)

        def choose(token, is_real):
            pl.when(token == 0)(lambda: wait_for_kernels_before(tokens))
            self._choose(jnp.maximum(token, 0), bias, is_real)

        rehearsed(begins_early(tokens), tokens, self.program, choose)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.chosen)

    def wait(self):
        """For the warpgroup that loads."""
        wait_for_kernels_before(self.layout.tokens)
        plgpu.barrier_wait(self.chosen)

    def _choose(self, token, bias, is_real):
        layout, first = self.layout, token * self.layout.top_k
        logits = self.logits.at[token]
        choose = Choice(logits, bias, layout.top_k, layout.scoring, is_real=is_real)
        slot = self.tokens[token] - 1
        stores = self.stores & is_real

        def remember(place, expert, score):
            # -2 of a token that no expert works on.
            group = jnp.where(slot < -1, layout.experts, expert)
            self.words[first + place] = place_of(group, slot, layout.experts)
            self.scores[first + place] = score

            @pl.when(stores)
            def _store():
                self.experts[token, place] = expert

        choose(remember)

        @pl.when(stores)
        def _weigh():
            def weigh(place, _):
                self.weights[token, place] = choose.weight(self.scores[first + place])

            lax.fori_loop(0, layout.top_k, weigh, None)
