"""Which tokens of which requests go into the next step.

Requests are admitted in order when there is a row, enough pages for all the tokens they may ever
have, and a slot for their adapter, so a running request never waits for memory. Each step takes one
token of every request that is generating, then fills the rest of the batch with prompt chunks.

A request that waits for a row or for pages is not passed by any. One that waits for a slot is
passed by requests whose adapter has a slot, and by those without an adapter; but after `MAX_PASSES`
of the former nothing with an adapter is admitted before it. So none starves. Take the first in the
queue: once no adapter passes it, those that run end, and some slot, as one is never pinned, is
without a running request and goes to nobody else; it then waits for a row and for pages alone,
which nobody takes before it. Then the next one is the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lora_moe_jax.adapters.pool import AdapterPool, Entry
from lora_moe_jax.serving.pages import PagePool
from lora_moe_jax.serving.request import GenerateRequest, Request

# About as many as run together: the batch stays full while the one slot that is waited for empties,
# and the wait grows by about the length of one request.
MAX_PASSES = 8


@dataclass(frozen=True)
class Chunk:
    """Tokens `start .. start + length` of a request, at rows `offset ..` of the batch.

    `completes` says whether they are the last known tokens of the request.
    """

    request: Request
    start: int
    length: int
    offset: int

    completes: bool

    @property
    def samples(self) -> bool:
        """Whether the next token is to be sampled after it."""
        return self.completes and isinstance(self.request, GenerateRequest)


@dataclass(frozen=True)
class StepBatch:
    """One step's arrays, padded to a shape bucket of T tokens and B requests.

    tokens, positions, token_slots, request: int32 [T] (request -1 for padding);
    page_tables: int32 [B, pages]; chunks: what the rows are.
    """

    tokens: np.ndarray
    positions: np.ndarray
    token_slots: np.ndarray
    request: np.ndarray
    page_tables: np.ndarray
    chunks: tuple[Chunk, ...]

    def device_arrays(self) -> dict[str, np.ndarray]:
        """What the compiled step takes."""
        names = ("tokens", "positions", "token_slots", "request", "page_tables")
        return {name: getattr(self, name) for name in names}


class Scheduler:
    """Waiting and running requests over a fixed number of rows, pages and adapter slots.

    Without `adapters` no request may have one.
    """

    def __init__(
        self,
        pool: PagePool,
        adapters: AdapterPool | None = None,
        *,
        rows: int,
        pages_per_request: int,
        token_buckets: tuple[int, ...],
        prefill_chunk: int,
    ):
        self.pool = pool
        self.adapters = adapters
        self.token_buckets = token_buckets
        self.prefill_chunk = prefill_chunk
        self.page_tables = np.zeros((rows, pages_per_request), np.int32)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_rows = list(range(rows - 1, -1, -1))

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests."""
        for request in requests:
            if request.adapter is not None:
                self.adapters.begin(request.adapter)
            self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees what it has."""
        if request in self.running:
            self.running.remove(request)
            self.pool.give_back(request.pages)
            self._free_rows.append(request.row)
            if request.adapter is not None:
                self.adapters.release(request.adapter)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return
        if request.adapter is not None:
            self.adapters.end(request.adapter)

    def next_batch(self) -> StepBatch | None:
        """Admits what fits and lays out the next step; None when nothing is left to do."""
        self._admit()
        lengths = self._lengths()
        if not lengths:
            return None
        total = sum(lengths.values())
        size = next(bucket for bucket in self.token_buckets if bucket >= total)
        chunks, offset = [], 0
        for request, length in lengths.items():
            start, request.computed = request.computed, request.computed + length
            completes = request.computed == len(request.tokens)
            chunks.append(Chunk(request, start, length, offset, completes))
            offset += length
        return self._layout(tuple(chunks), size)

    def _admit(self) -> None:
        slotless: list[Request] = []  # skipped; the first has been passed the most often
        for request in list(self.waiting):
            needed = self.pool.needed(request.capacity)
            if not self._free_rows or needed > self.pool.free:
                return
            if request.adapter is not None:
                if not self._acquire_slot(request.adapter, slotless):
                    slotless.append(request)
                    continue
                for other in slotless:
                    other.passed += 1
            self._start(request, needed)

    def _acquire_slot(self, adapter: Entry, slotless: list[Request]) -> bool:
        if slotless and (adapter.slot is None or slotless[0].passed >= MAX_PASSES):
            return False  # where the first found no slot there is none, or it is the first's
        return self.adapters.acquire(adapter)

    def _start(self, request: Request, needed: int) -> None:
        self.waiting.remove(request)
        request.row = self._free_rows.pop()
        request.pages = self.pool.take(needed)
        self.page_tables[request.row] = 0
        self.page_tables[request.row, :needed] = request.pages
        self.running.append(request)

    def _lengths(self) -> dict[Request, int]:
        """Tokens of each request in the next step: generating requests first, then prompts."""
        budget = self.token_buckets[-1]
        lengths = {}
        # A stable order: prompts stay in the order in which they came, and none is overtaken.
        for request in sorted(self.running, key=lambda r: r.computed < r.prompt_length):
            remaining = len(request.tokens) - request.computed
            length = min(remaining, budget, self.prefill_chunk)
            if length:
                lengths[request] = length
                budget -= length
        return lengths

    def _layout(self, chunks: tuple[Chunk, ...], size: int) -> StepBatch:
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        token_slots, request = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        for chunk in chunks:
            rows = slice(chunk.offset, chunk.offset + chunk.length)
            tokens[rows] = chunk.request.tokens[chunk.start : chunk.start + chunk.length]
            positions[rows] = np.arange(chunk.start, chunk.start + chunk.length)
            token_slots[rows] = chunk.request.slot
            request[rows] = chunk.request.row
        return StepBatch(tokens, positions, token_slots, request, self.page_tables.copy(), chunks)
