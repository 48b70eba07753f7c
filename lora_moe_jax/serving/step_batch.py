"""The work of one step: chunks of requests, laid out as a flat batch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lora_moe_jax.serving.request import GenerateRequest, Request
from lora_moe_jax.serving.step_layout import FED_BACK, RowInputs, StepLayout


class Chunk(NamedTuple):
    """Tokens `start .. start + length` of a request, at places `offset ..` of the batch.

    `completes` says whether they are the last of the request so far, `samples` whether the next
    token is to be sampled after them. `row` and `life` are the request's when the batch was made:
    what comes out belongs to it only while its `life` is that. `version` is the adapter's then:
    when it is read the request may go on with a newer one.
    """

    request: Request
    start: int
    length: int
    offset: int
    completes: bool
    samples: bool
    row: int
    life: int
    version: int | None


class StepBatch(NamedTuple):
    """A batch of `size` tokens as the device takes it.

    Attributes:
      packed: int32, see `StepLayout`. None where the step before, of the same size, was of the same
        rows, a token earlier each, and nothing has changed: what it gave is taken.
      steps: how many steps the device takes by itself, feeding its tokens back.
      filters: whether the next token of any row is filtered by top-k, top-p or min-p.
      top: whether the most likely tokens in its place are wanted for any row.
      chunks: what is in the batch, as it was laid out; of a batch of several steps, what the first
        one takes.
      generating: how many of them, the first, are tokens that their requests generated.
      age: how many steps ago it was laid out: each chunk starts so many tokens later now.
    """

    packed: np.ndarray | None
    size: int
    steps: int
    filters: bool
    top: bool
    chunks: list[Chunk]
    generating: int
    age: int = 0

    def advanced(self) -> StepBatch:
        """The step that follows one of requests that all generate, where nothing has changed."""
        return self._replace(packed=None, age=self.age + 1)

    def chunks_now(self) -> list[Chunk]:
        """The chunks where they start in this step."""
        return [chunk._replace(start=chunk.start + self.age) for chunk in self.chunks]


class RowTable:
    """The rows' part of the step inputs, kept from step to step.

    Attributes:
      values: views of it.
    """

    def __init__(self, layout: StepLayout):
        self._layout = layout
        self._part = np.zeros(layout.row_size, np.int32)
        self._filters, self._top = np.zeros(layout.rows, bool), np.zeros(layout.rows, bool)
        self.values: RowInputs = layout.row_values(self._part)

    def start(self, request: Request) -> None:
        """A request begins in its row."""
        row, values = request.row, self.values
        values.page_tables[row] = 0
        values.slots[row] = request.slot
        if isinstance(request, GenerateRequest):
            params = request.params
            values.temperature[row] = params.temperature
            values.top_k[row] = params.top_k
            values.top_p[row] = params.top_p
            values.min_p[row] = params.min_p
            values.seed[row] = request.seed
            self._filters[row] = params.filters
            self._top[row] = bool(params.logprobs)

    def lay_out(
        self,
        generating: Sequence[Request],
        prompts: Sequence[tuple[Request, int]],
        *,
        size: int,
        steps: int,
    ) -> StepBatch:
        """One token of those that generate, then so many tokens of each prompt.

        Those of one adapter lie together: a product reads its factors once for each stretch of
        rows with one adapter, and multiplies as often.
        """
        generating = sorted(generating, key=operator.attrgetter("slot"))
        prompts = sorted(prompts, key=lambda prompt: prompt[0].slot)
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        rows, values = np.full(size, -1, np.int32), self.values
        count = len(generating)
        chunks = [
            Chunk(r, r.computed, 1, at, True, True, r.row, r.life, r.version)
            for at, r in enumerate(generating)
        ]
        where = [r.row for r in generating]
        tokens[:count] = [FED_BACK if r.pending else r.tokens[-1] for r in generating]
        positions[:count] = [r.computed for r in generating]
        rows[:count] = where
        values.sample_at[:] = -1
        values.sample_at[where] = np.arange(count)
        values.step[where] = [r.computed + 1 - r.prompt_length for r in generating]
        offset = count
        for request, length in prompts:
            start = request.computed
            end = start + length
            places = slice(offset, offset + length)
            tokens[places] = request.tokens[start:end]
            positions[places] = np.arange(start, end)
            rows[places] = request.row
            completes = end == len(request.tokens)
            samples = completes and isinstance(request, GenerateRequest)
            row, life, version = request.row, request.life, request.version
            chunks.append(
                Chunk(request, start, length, offset, completes, samples, row, life, version)
            )
            offset += length
            if samples:
                where.append(row)
                values.sample_at[row] = offset - 1
                values.step[row] = end - request.prompt_length
        packed = self._layout.pack(tokens, positions, rows, self._part)
        filters, top = bool(self._filters[where].any()), bool(self._top[where].any())
        return StepBatch(packed, size, steps, filters, top, chunks, count)
