"""Which tokens of which requests go into the next step.

Requests are admitted in order, by priority (the smaller number first) and then as they came, when
there is a row, a slot for their adapter, and pages for the tokens that they have and one page more.
Each step takes one token of every request that is generating, then fills the rest of the batch with
prompt chunks, in the order of admission. Requests take pages as they grow; where none is left one
of the lowest priority makes room, of several the one that was admitted last: it goes back to the
front of its priority with its tokens, which are computed again later. Of the highest priority that
runs, the one that has run for longest never has to. Nobody makes room for one that waits.

Full pages are shared by all requests that begin with the same tokens under the same version of an
adapter. A request whose next page a running one is about to fill waits for it, and is passed
meanwhile: of many samples of one prompt, one computes it.

Where versions switch, requests go on with the newest one, at once. One that runs keeps what it has
in the cache, and shares none of it any more, nor what follows from it; so it is with what others
computed and it found there. A score of which a part is computed starts over. Nothing of the version
before is found again, and its pages go with the last request that reads them.

A request that waits for a row or for pages is not passed by any. One that waits for a slot is
passed by requests whose adapter has a slot, and by those without an adapter; but after `MAX_PASSES`
of the former nothing with an adapter is admitted before it. So none starves. Take the first in the
queue: once no adapter passes it, those that run end, and some slot, as one is never pinned, is
without a running request and goes to nobody else; it then waits for a row and for pages alone,
which nobody takes before it but those that ran already and made room. Then the next is the first.
One whose adapter is being written to its slot is passed by any, for as many steps as that takes:
nobody takes the slot meanwhile, and then it has its turn before those behind it.
All this holds within a priority and while no request of a higher one comes: as those go first, a
lower priority starves for as long as they keep coming. Of the lower ones, no more than `MAX_PASSES`
with adapters pass a request that waits for a slot.

A step that is the one before with each request a token further is not laid out, as the device has
what it needs. So whatever changes anything else must say so (`_repeats`).

Steps are laid out before the results of earlier ones are known; `request.pending` counts tokens on
their way. The device takes steps in the order in which they were begun, so no more is needed than
that the host's books follow that order too:
- A page or row that a request gives up while a step that it is in is under way may go to another at
  once. That step's writes land before those of the first step that the other is in, and the other
  reads no position that it has not itself written or found in the prefix cache.
- A page is in the prefix cache only when all its tokens are known (not pending) and the step that
  writes the last of them has been begun: it lands before anything reads it. Nobody writes there
  again: a request writes behind what is shared of it.
- A request may turn out to have ended, or be aborted, while a step computes on. That writes to its
  private pages, or once more the same; what comes out belongs to an earlier `life` of the request,
  and is dropped.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from lora_moe_jax.adapters.entry import Entry
from lora_moe_jax.adapters.pool import AdapterPool
from lora_moe_jax.serving.pages import PagePool
from lora_moe_jax.serving.prefix_cache import CachedPage, PageKey
from lora_moe_jax.serving.request import Request, ScoreRequest
from lora_moe_jax.serving.step_batch import RowTable, StepBatch
from lora_moe_jax.serving.step_layout import StepLayout

# When one request needs a page, those that will within so many tokens get theirs too: for each time
# that pages are given the host lays a step out anew and sends it. With 64 requests and pages of 64
# tokens that would be nearly every step, and is every 16th so.
EARLY = 16

# About as many as run together: the batch stays full while the one slot that is waited for empties,
# and the wait grows by about the length of one request.
MAX_PASSES = 8

# Parts of adapters that are written in one step's time: more than the first few while the device is
# busy. The runtime takes some 30 operations before the first has run, and then lets the host wait.
LEAST_PARTS, MOST_PARTS = 4, 16


class Scheduler:
    """Waiting and running requests over a fixed number of rows, pages and adapter slots.

    Without `adapters` no request may have one. Where nobody waits, and none of those that run can
    end by its length or wants the most likely tokens, a batch is for `decode_steps` steps.

    Attributes:
      waiting: in the order in which they are to be admitted.
      running: in the order in which they were.
      counts: tokens of prompts that were found in the cache and not computed, and how many times a
        request made room for another.
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
        decode_steps: int = 1,
    ):
        self.counts = {"prefix_hit_tokens": 0, "preemptions": 0}
        self.pool = pool
        self.adapters = adapters
        self.token_buckets = token_buckets
        self.prefill_chunk = prefill_chunk
        self.prefix_cache = prefix_cache
        self.decode_steps = decode_steps
        self._rows = RowTable(StepLayout(rows, pages_per_request))
        self.page_tables = self._rows.values.page_tables
        self._pages_per_request = pages_per_request
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._most_rows = rows
        self._free_rows = list(range(rows - 1, -1, -1))
        # Whether one that waits may be admitted now, as far as is known without looking.
        self._look = False
        self._awaited: set[PageKey] = set()  # pages for which the last look passed some
        self._last: StepBatch | None = None
        # How many of the next steps are the last one over again, each request a token further.
        # Whatever changes who runs, what its pages and slot are or what computes it makes this 0.
        self._repeats = 0

    @property
    def unfinished(self) -> int:
        """How many requests wait and run."""
        return len(self.waiting) + len(self.running)

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests."""
        self._look = True
        for request in requests:
            if request.adapter is not None:
                self.adapters.begin(request.adapter)
            bisect.insort_right(self.waiting, request, key=_priority)

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

    def switch_versions(self) -> None:
        """Requests whose version has a successor go on with it."""
        for request in [*self.waiting, *reversed(self.running)]:
            while request.adapter is not None and request.adapter.successor is not None:
                request.switch(request.adapter.successor)
                self._repeats = 0
                if isinstance(request, ScoreRequest) and request.in_parts:
                    self._back_to_the_queue(request)
            if request.row < 0 or (request.slot is None and request.adapter.is_lost):
                continue
            if request.slot is None:  # it could not be written, and has to be written again
                self._back_to_the_queue(request)
            else:  # perhaps another one
                self._rows.values.slots[request.row] = request.slot
        self.drop_unloaded()

    def drop_unloaded(self) -> None:
        """Frees the pages of adapters that were replaced or unloaded, if no request needs them."""
        self.pool.give_back(self.pool.prefixes.drop_unloaded())
        self.look_again()

    def look_again(self) -> None:
        """Adapters have changed: one that waits may have its turn."""
        self._look = True

    def start_over(self) -> None:
        """A step has failed: nothing in the cache counts; what runs is computed again."""
        for request in reversed(self.running.copy()):
            self._back_to_the_queue(request)
        self.pool.give_back(self.pool.prefixes.clear())

    def next_batch(self) -> StepBatch | None:
        """Admits what fits and lays out the next step.

        None when there is nothing to do before a step under way is read, or at all.
        """
        if not self._repeats and not self._grow():
            return None
        self._admit()
        if self._repeats:
            self._repeats -= 1
            return self._booked(self._last.advanced())
        generating, prompts = self._split()
        if not generating and not prompts:
            return None
        total = len(generating) + sum(length for _, length in prompts)
        steps = self.decode_steps if self._can_go_on(generating, prompts) else 1
        # Several steps at once are compiled for one size.
        total = total if steps == 1 else self._most_rows
        size = next(bucket for bucket in self.token_buckets if bucket >= total)
        batch = self._rows.lay_out(generating, prompts, size=size, steps=steps)
        self._booked(batch)
        self._repeats = self._steps_alike(batch)
        return batch

    def _booked(self, batch: StepBatch) -> StepBatch:
        """Enters a batch into its requests' books, as it is about to be begun."""
        self._last, steps = batch, batch.steps
        for chunk in batch.chunks:
            request = chunk.request
            request.computed += chunk.length + steps - 1
            if chunk.completes:
                request.pending += steps
        return batch

    def _steps_alike(self, batch: StepBatch) -> int:
        """How many steps may follow that differ from this one by a token of each request alone.

        Filters are run from the host's array. Where the device may take several steps by itself,
        whether it may now is asked in every step.
        """
        if batch.generating < len(self.running) or batch.filters or self.decode_steps > 1:
            return 0
        size = self.pool.page_size
        return min(min(r.capacity, len(r.pages) * size) - r.computed for r in self.running)

    def wrote(self, batch: StepBatch) -> None:
        """The batch has been begun: pages of prompts that it fills may be found from now on."""
        for chunk in batch.chunks[batch.generating :]:
            self.share(chunk.request)

    def share(self, request: Request) -> None:
        """Lets others find the full pages of a running request whose tokens are all known."""
        pages, limit = request.pages, min(request.computed, len(request.tokens))
        shares = self.prefix_cache and not request.mixed
        while shares and (key := self._key(request, request.cached, limit)):
            place = len(request.cached)
            cached = self.pool.prefixes.add(request.adapter, key, pages[place])
            request.cached.append(cached)
            self._look |= key in self._awaited
            if cached.page != pages[place]:  # another request has filled one just like it
                self.pool.give_back([pages[place]])
                self._set_pages(request, place, [cached.page])
                self._look = True

    def _being_filled(self, request: Request) -> PageKey | None:
        """What the next page of a running request will be found by, if all its tokens are known."""
        if not self.prefix_cache or request.mixed:
            return None
        return self._key(request, request.cached, len(request.tokens))

    def _key(self, request: Request, chain: list[CachedPage], limit: int) -> PageKey | None:
        return self.pool.prefixes.key(request.adapter, request.tokens, chain, limit)

    def _grow(self) -> bool:
        """Gives every running request the pages for its next token, by priority, oldest first.

        False if pages are missing that what is under way may bring: a request may have ended.
        """
        size = self.pool.page_size
        # In one expression, as this is asked of every request in every step.
        lacking = [
            r
            for r in self.running
            if len(r.pages) * size < len(r.tokens) + r.pending and len(r.pages) * size < r.capacity
        ]
        for request in sorted(lacking, key=_priority):
            while request.row >= 0 and len(request.pages) * size < request.ready:
                if self.pool.free:
                    self._append_pages(request, self.pool.take(1))
                elif any(other.pending for other in self.running):
                    return False
                else:
                    self._preempt(max(reversed(self.running), key=_priority))
        if lacking:
            self._grow_early()
        return True

    def _grow_early(self) -> None:
        """Gives a page to every running request that will lack one soon, if there is one for each.

        Then none lacks one until all these are in use: nobody makes room for them. Where one waits,
        as many as it can need stay free.
        """
        size, spare = self.pool.page_size, self.pool.free
        early = min(EARLY, size - 1)  # so nobody gets two
        if self.waiting:
            spare -= self._pages_per_request
        soon = [
            r
            for r in self.running
            if len(r.pages) * size < min(len(r.tokens) + r.pending + early, r.capacity)
        ]
        if len(soon) <= spare:
            for request in soon:
                self._append_pages(request, self.pool.take(1))

    def _preempt(self, request: Request) -> None:
        self._back_to_the_queue(request)
        self.counts["preemptions"] += 1

    def _back_to_the_queue(self, request: Request) -> None:
        self._stop(request)
        request.restart()
        bisect.insort_left(self.waiting, request, key=_priority)

    def _admit(self) -> None:
        if not (self.waiting and self._free_rows and (self._look or not self.running)):
            return
        self._look = False
        self._awaited.clear()
        slotless: list[Request] = []  # skipped
        being_filled = set(map(self._being_filled, self.running))
        for request in list(self.waiting):
            if not self._free_rows:
                return
            found = self.pool.prefixes.find(request.adapter, request.tokens, request.reusable)
            missing = self._key(request, found, request.reusable)
            if missing is not None and missing in being_filled:
                self._awaited.add(missing)
                continue
            # Of the pages that were found, the idle ones are among the free ones.
            needed = self._needed(request)
            if needed - sum(cached.users > 0 for cached in found) > self.pool.free:
                return
            if request.adapter is not None:
                if not self._acquire_slot(request.adapter, slotless):
                    if request.adapter.slot is None:
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
        # Where nobody runs, nobody has to wait for what is written.
        return self.adapters.acquire(adapter, at_once=not self.running)

    def write_slots(self, busy: Callable[[], bool]) -> None:
        """Goes on writing adapters to their slots: some parts, more while the device is busy."""
        for number in range(MOST_PARTS):
            if self.adapters is None or not self.adapters.writing:
                return
            if number >= LEAST_PARTS and not busy():
                return
            self._look |= self.adapters.write_part()

    def _needed(self, request: Request) -> int:
        """Pages to begin with: one more than it fills at once, so that it gets on with them."""
        now = self.pool.needed(len(request.tokens))
        return min(now + 1, self.pool.needed(request.capacity))

    def _start(self, request: Request, found: list[CachedPage], needed: int) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.row = self._free_rows.pop()
        self._rows.start(request)
        self.pool.prefixes.use(found)
        request.cached = found
        self._append_pages(request, [cached.page for cached in found])
        self._append_pages(request, self.pool.take(needed - len(found)))
        request.computed = len(found) * self.pool.page_size
        self.counts["prefix_hit_tokens"] += min(request.computed, request.prompt_length)

    def _append_pages(self, request: Request, pages: list[int]) -> None:
        self._set_pages(request, len(request.pages), pages)

    def _set_pages(self, request: Request, start: int, pages: list[int]) -> None:
        end = start + len(pages)
        request.pages[start:end] = self.page_tables[request.row, start:end] = pages
        self._repeats = 0

    def _stop(self, request: Request) -> None:
        self._look = True
        self._repeats = 0
        request.life += 1
        self.running.remove(request)
        self.pool.prefixes.release(request.cached)
        self.pool.give_back(request.pages[len(request.cached) :])
        self._free_rows.append(request.row)
        if request.adapter is not None:
            self.adapters.release(request.adapter)
        if request.mixed:  # perhaps the last that reads pages of an older version
            self.drop_unloaded()

    def _split(self) -> tuple[list[Request], list[tuple[Request, int]]]:
        """Who generates in the next step, and so many tokens of which prompts."""
        generating, unfinished = [], []
        for request in self.running:
            remaining = request.ready - request.computed
            if remaining == 1 and request.computed >= request.prompt_length:
                generating.append(request)
            elif remaining > 0:
                unfinished.append((request, remaining))
        # In the order in which they came: no prompt is overtaken.
        prompts, budget = [], self.token_buckets[-1] - len(generating)
        for request, remaining in unfinished:
            length = min(remaining, budget, self.prefill_chunk)
            if length:
                prompts.append((request, length))
                budget -= length
        return generating, prompts

    def _can_go_on(self, generating: list[Request], prompts: list) -> bool:
        """Whether the device may take several steps; then their pages are taken.

        Not with filters: asked for them in every step, the host would wait each time.
        """
        steps = self.decode_steps
        if steps == 1 or prompts or self.waiting:
            return False
        if any(r.computed + steps > r.capacity for r in generating):
            return False
        if any(r.params.logprobs or r.params.filters for r in generating):
            return False
        missing = [self.pool.needed(r.computed + steps) - len(r.pages) for r in generating]
        if sum(max(count, 0) for count in missing) > self.pool.free:
            return False
        for request, count in zip(generating, missing, strict=True):
            self._append_pages(request, self.pool.take(max(count, 0)))
        return True


def _priority(request: Request) -> int:
    return request.priority
