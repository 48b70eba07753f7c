"""Which tokens of which requests go into the next step.

Requests are admitted in order when there is a row, a slot for their adapter, and pages for the
tokens that they have and one page more. Each step takes one token of every request that is
generating, then fills the rest of the batch with prompt chunks. Requests take pages as they grow;
where none is left the one that was admitted last makes room: it goes back to the front of the queue
with its tokens, which are computed again later. The one that has run for longest never has to.

Full pages are shared by all requests that begin with the same tokens under the same version of an
adapter. A request whose next page a running one is about to fill waits for it, and is passed
meanwhile: of many samples of one prompt, one computes it.

A request that waits for a row or for pages is not passed by any. One that waits for a slot is
passed by requests whose adapter has a slot, and by those without an adapter; but after `MAX_PASSES`
of the former nothing with an adapter is admitted before it. So none starves. Take the first in the
queue: once no adapter passes it, those that run end, and some slot, as one is never pinned, is
without a running request and goes to nobody else; it then waits for a row and for pages alone,
which nobody takes before it but those that ran already and made room. Then the next is the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lora_moe_jax.adapters.pool import AdapterPool, Entry
from lora_moe_jax.serving.pages import PagePool
from lora_moe_jax.serving.prefix_cache import CachedPage, PageKey
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

    Attributes:
      counts: tokens of prompts that were found in the cache and not computed, and how many times a
        request made room for an older one.
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
        prefix_cache: bool = True,
    ):
        self.counts = {"prefix_hit_tokens": 0, "preemptions": 0}
        self.pool = pool
        self.adapters = adapters
        self.token_buckets = token_buckets
        self.prefill_chunk = prefill_chunk
        self.prefix_cache = prefix_cache
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
            self._stop(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return
        if request.adapter is not None:
            self.adapters.end(request.adapter)
            if request.adapter.adapter is None:
                self.drop_unloaded()

    def drop_unloaded(self) -> None:
        """Frees the pages of adapters that were replaced or unloaded, if no request needs them."""
        self.pool.give_back(self.pool.prefixes.drop_unloaded())

    def next_batch(self) -> StepBatch | None:
        """Admits what fits and lays out the next step; None when nothing is left to do."""
        self._grow()
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

    def wrote(self, batch: StepBatch) -> None:
        """The batch has been run: pages that it filled may be found from now on."""
        if self.prefix_cache:
            for chunk in batch.chunks:
                self._share(chunk.request)

    def _share(self, request: Request) -> None:
        pages = request.pages
        while key := self._key(request, request.cached, request.computed):
            place = len(request.cached)
            cached = self.pool.prefixes.add(request.adapter, key, pages[place])
            request.cached.append(cached)
            if cached.page != pages[place]:  # another request has filled one just like it
                self.pool.give_back([pages[place]])
                pages[place] = self.page_tables[request.row, place] = cached.page

    def _being_filled(self, request: Request) -> PageKey | None:
        """What the next page of a running request will be found by, if all its tokens are known."""
        if not self.prefix_cache:
            return None
        return self._key(request, request.cached, len(request.tokens))

    def _key(self, request: Request, chain: list[CachedPage], limit: int) -> PageKey | None:
        return self.pool.prefixes.key(request.adapter, request.tokens, chain, limit)

    def _grow(self) -> None:
        """Gives every running request the pages for its next token, the oldest first."""
        for request in list(self.running):
            while request.row >= 0 and len(request.pages) < self.pool.needed(len(request.tokens)):
                if self.pool.free:
                    self._append_pages(request, self.pool.take(1))
                else:
                    self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        self._stop(request)
        request.restart()
        self.waiting.appendleft(request)
        self.counts["preemptions"] += 1

    def _admit(self) -> None:
        slotless: list[Request] = []  # skipped
        being_filled = set(map(self._being_filled, self.running))
        for request in list(self.waiting):
            if not self._free_rows:
                return
            found = self.pool.prefixes.find(request.adapter, request.tokens, request.reusable)
            missing = self._key(request, found, request.reusable)
            if missing is not None and missing in being_filled:
                continue
            # Of the pages that were found, the idle ones are among the free ones.
            needed = self._needed(request)
            if needed - sum(cached.users > 0 for cached in found) > self.pool.free:
                return
            if request.adapter is not None:
                if not self._acquire_slot(request.adapter, slotless):
                    slotless.append(request)
                    continue
                for other in slotless:
                    other.passed += 1
            self._start(request, found, needed)
            being_filled.add(self._being_filled(request))

    def _acquire_slot(self, adapter: Entry, slotless: list[Request]) -> bool:
        overdue = any(request.passed >= MAX_PASSES for request in slotless)
        if overdue or (slotless and adapter.slot is None):
            return False  # where the first found no slot there is none, or it is another's
        return self.adapters.acquire(adapter)

    def _needed(self, request: Request) -> int:
        """Pages to begin with: one more than it fills at once, so that it gets on with them."""
        now = self.pool.needed(len(request.tokens))
        return min(now + 1, self.pool.needed(request.capacity))

    def _start(self, request: Request, found: list[CachedPage], needed: int) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.row = self._free_rows.pop()
        self.page_tables[request.row] = 0
        self.pool.prefixes.use(found)
        request.cached = found
        self._append_pages(request, [cached.page for cached in found])
        self._append_pages(request, self.pool.take(needed - len(found)))
        request.computed = len(found) * self.pool.page_size
        self.counts["prefix_hit_tokens"] += min(request.computed, request.prompt_length)

    def _append_pages(self, request: Request, pages: list[int]) -> None:
        start = len(request.pages)
        request.pages += pages
        self.page_tables[request.row, start : len(request.pages)] = pages

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.prefixes.release(request.cached)
        self.pool.give_back(request.pages[len(request.cached) :])
        self._free_rows.append(request.row)
        if request.adapter is not None:
            self.adapters.release(request.adapter)

    def _lengths(self) -> dict[Request, int]:
        """Tokens of each request in the next step: generating requests first, then prompts."""
        budget = self.token_buckets[-1]
        lengths = {}
        # A stable order: prompts stay in the order in which they came, and none is overtaken.
        for request in sorted(self.running, key=lambda r: not r.generating):
            length = min(request.remaining, budget, self.prefill_chunk)
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
