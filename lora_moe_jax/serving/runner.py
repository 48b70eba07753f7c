"""The loop: begins steps, reads their results, hands each request its tokens, text and scores.

A step is begun before the results of the one before it are read, so that the device always has
work; what has to be known for that it feeds back to itself. A request that a token or a string
stops is thus found to have ended a step late: what was computed beyond is dropped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from lora_moe_jax.parallel.own_placement import own_placement
from lora_moe_jax.serving.compile_guard import no_compile
from lora_moe_jax.serving.interrupts import uninterrupted
from lora_moe_jax.serving.request import (
    Completion,
    Delta,
    FinishReason,
    GenerateRequest,
    Request,
    ScoreRequest,
)
from lora_moe_jax.serving.scheduler import Scheduler
from lora_moe_jax.serving.step_batch import Chunk, StepBatch
from lora_moe_jax.serving.step_layout import split_chosen
from lora_moe_jax.serving.steps import Scores, Steps, TopK
from lora_moe_jax.serving.text import TextCodec, TextStream
from lora_moe_jax.serving.top_logprobs import TopRows


class UnderWay(NamedTuple):
    """A step that was begun: its batch, and its results on the device.

    Attributes:
      scores: of the tokens from the first that is scored on.
    """

    batch: StepBatch
    chosen: jax.Array
    top: TopK | None
    scores: list[Scores]


class ScoredRows(NamedTuple):
    """The same on the host. `first` is the place in the batch of its first row."""

    first: int
    logprobs: np.ndarray
    logits: np.ndarray | None
    likely: TopRows | None


class Runner:
    """Runs requests of the scheduler through the compiled steps.

    Attributes:
      counts: steps begun, prompt tokens computed and tokens generated so far.
      deltas: of each unfinished request, in the order in which they came, what nobody has fetched.
      dropped: requests of streams that are gone. The collector may find one in the middle of a
        step, so their end is left to the next operation.
    """

    def __init__(
        self,
        steps: Steps,
        scheduler: Scheduler,
        codec: TextCodec | None,
    ):
        self.steps = steps
        self.scheduler = scheduler
        self.counts = {"steps": 0, "prompt_tokens": 0, "generated_tokens": 0}
        self._codec = codec
        self._under_way: deque[UnderWay] = deque()
        self._host_seconds = 0.0
        self._page_size = scheduler.pool.page_size
        self._streams: dict[Request, TextStream] = {}
        self.deltas: dict[Request, deque[Delta]] = {}
        self.dropped: deque[Sequence[Request]] = deque()
        # Threads share steps. Whoever streams looks under it whether a request is done: its last
        # delta is there before that.
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """What neither an interrupt nor another thread comes into; dropped requests end before."""
        with uninterrupted(), self.lock, own_placement():
            while self.dropped:
                self._forget(self.dropped.popleft())
            yield

    def run(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Steps the engine until these requests are done; others that are running go along.

        Whoever does not take all of it has to `forget` them.
        """
        with self.operation():
            for request in requests:
                self.deltas[request] = deque()
                if isinstance(request, GenerateRequest) and self._codec is not None:
                    self._streams[request] = TextStream(self._codec, request.params.stop)
            self.scheduler.add(requests)
        return self._drain(requests)

    def _drain(self, requests: Sequence[Request]) -> Iterator[Delta]:
        unfinished = list(requests)
        try:
            while unfinished:
                for request, deltas, done in self._taken(unfinished):
                    yield from deltas
                    if done:
                        unfinished.remove(request)
                # One that was aborted after its turn has a delta to hand over first.
                if unfinished and not any(request.done for request in unfinished):
                    self.step()
        except GeneratorExit:  # perhaps the collector's, in the middle of a step
            raise
        except BaseException:
            self.forget(requests)
            raise
        self.forget(requests)

    def _taken(self, requests: Sequence[Request]) -> list[tuple[Request, list[Delta], bool]]:
        """Of each request what nobody has fetched, and whether that is all."""
        taken = []
        with self.operation():
            for request in requests:
                deltas = self.deltas[request]
                taken.append((request, list(deltas), request.done))
                deltas.clear()
        return taken

    def forget(self, requests: Sequence[Request]) -> None:
        """Ends requests that have not ended, silently; harmless a second time."""
        with self.operation():
            self._forget(requests)

    def _forget(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._finish(request)
            self.deltas.pop(request, None)
            self._streams.pop(request, None)

    @property
    def host_ms_per_step(self) -> float:
        """What the host did for a step on average, waiting for results apart."""
        return 1e3 * self._host_seconds / max(self.counts["steps"], 1)

    def step(self) -> None:
        """Begins a step of all running requests, and reads the one before it into `deltas`.

        If it fails, every request that runs starts over, with the tokens that have come out of it.
        """
        with self.operation():
            self._step()

    def _step(self) -> None:
        begun, waited = time.perf_counter(), self.steps.waited
        with self._starting_over():
            batch = self.scheduler.next_batch()
            if batch is not None:
                with no_compile("a step"):
                    self._under_way.append(self._begin(batch))
            elif self.scheduler.waiting and not self._under_way:
                raise AssertionError("requests wait, and none of them can ever run")
            if len(self._under_way) > (batch is not None):
                self._write_slots(self._under_way[0])
                self._read(self._under_way.popleft())
        self._host_seconds += time.perf_counter() - begun - (self.steps.waited - waited)

    def _write_slots(self, step: UnderWay) -> None:
        """Adapters that requests wait for go to their slots while the device computes a step."""
        begun = time.perf_counter()
        self.scheduler.write_slots(lambda: not step.chosen.is_ready())
        self._host_seconds -= time.perf_counter() - begun

    @contextlib.contextmanager
    def _starting_over(self) -> Iterator[None]:
        """An interrupted step leaves books that say more than the device has done."""
        try:
            yield
        except BaseException:
            self._under_way.clear()
            self.scheduler.start_over()
            self.steps.check()
            raise

    def _begin(self, batch: StepBatch) -> UnderWay:
        results = self.steps.run(batch)
        self.scheduler.wrote(batch)
        scores = self._score(batch, results.hidden)
        self.counts["steps"] += batch.steps
        for chunk in batch.chunks[batch.generating :]:
            inside_prompt = chunk.request.prompt_length - chunk.start
            self.counts["prompt_tokens"] += max(min(inside_prompt, chunk.length), 0)
        return UnderWay(batch, results.chosen, results.top, scores)

    def _score(self, batch: StepBatch, hidden: jax.Array | None) -> list[Scores]:
        chunks = _scored_chunks(batch)
        if not chunks:
            return []
        first, end = chunks[0].offset, chunks[-1].offset + chunks[-1].length
        targets, slots = np.zeros(end, np.int32), np.full(end, -1, np.int32)
        for chunk in chunks:
            after = chunk.request.tokens[chunk.start + 1 : chunk.start + chunk.length + 1]
            targets[chunk.offset : chunk.offset + len(after)] = after
            slots[chunk.offset : chunk.offset + chunk.length] = chunk.request.slot
        return self.steps.score(
            hidden,
            first,
            slots[first:],
            targets[first:],
            top=any(chunk.request.alternatives for chunk in chunks),
            logits=any(chunk.request.return_logits for chunk in chunks),
        )

    @uninterrupted()
    def drain(self) -> None:
        """Reads what is under way; the device has no step to do then."""
        with self._starting_over():
            while self._under_way:
                self._read(self._under_way.popleft())

    def _read(self, under_way: UnderWay) -> None:
        """Hands out what a step has given to the requests that are still as it found them."""
        tokens, logprobs = split_chosen(self.steps.fetch(under_way.chosen))
        several = list(zip(tokens, logprobs, strict=True))
        likely, scored = self._top_rows(under_way.top), self._scored_rows(under_way)
        generated = 0
        for chunk in under_way.batch.chunks:
            request, row = chunk.request, chunk.row
            if chunk.samples:
                for some_tokens, some_logprobs in several:
                    if request.life == chunk.life:
                        self._take_token(chunk, some_tokens[row], some_logprobs[row], likely)
                        generated += 1
            elif request.life == chunk.life and isinstance(request, ScoreRequest):
                self._take_score(request, chunk, scored)
        self.counts["generated_tokens"] += generated

    def _top_rows(self, top: TopK | None) -> TopRows | None:
        return None if top is None else TopRows(*map(self.steps.fetch, top))

    def _scored_rows(self, under_way: UnderWay) -> ScoredRows | None:
        if not under_way.scores:
            return None
        logprobs, logits, top = zip(*under_way.scores, strict=True)
        likely = None if top[0] is None else TopRows(*map(self._fetch, zip(*top, strict=True)))
        return ScoredRows(
            first=_scored_chunks(under_way.batch)[0].offset,
            logprobs=self._fetch(logprobs),
            logits=None if logits[0] is None else self._fetch(logits),
            likely=likely,
        )

    def _fetch(self, blocks: Sequence[jax.Array]) -> np.ndarray:
        """Rows of several arrays as one."""
        return np.concatenate([self.steps.fetch(block) for block in blocks])

    def _take_score(self, request: ScoreRequest, chunk: Chunk, scored: ScoredRows) -> None:
        begin = chunk.offset - scored.first
        rows = slice(begin, begin + chunk.length)
        request.logprobs.append(scored.logprobs[rows])
        if request.return_logits:
            request.logits.append(scored.logits[rows])
        if count := request.alternatives:
            places = range(rows.start, rows.stop)
            request.top_logprobs += [scored.likely.pairs(row, count) for row in places]
        if chunk.completes:
            self._finish(request)

    def _take_token(self, chunk: Chunk, token: int, logprob: float, likely: TopRows | None) -> None:
        request: GenerateRequest = chunk.request
        tokens, count = request.tokens, request.params.logprobs
        tokens.append(token)
        request.pending -= 1
        request.logprobs.append(logprob)
        request.versions.append(chunk.version)
        if count:
            request.top_logprobs.append(likely.pairs(chunk.row, count))
        if (len(request.cached) + 1) * self._page_size <= len(tokens):
            self.scheduler.share(request)
        stream = self._streams.get(request)
        text = None if stream is None else stream.push(token)
        stopped = token in request.stop_tokens or (stream is not None and stream.stopped)
        completion = None
        if stopped or len(tokens) > request.capacity:
            self._finish(request)
            text = None if stream is None else text + stream.finish()
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            completion = _completion(request, reason, stream)
        shown = None if count is None else logprob
        top = request.top_logprobs[-1] if count else None
        delta = Delta(request.index, token, shown, text, completion, top, chunk.version)
        self.deltas[request].append(delta)

    def abort(self, request: Request) -> None:
        """Ends a request, with what it has, unless it has ended.

        What steps under way give it is dropped.
        """
        with self.operation():
            self._abort(request)

    def _abort(self, request: Request) -> None:
        if request.done:
            return
        request.aborted = True
        self._finish(request)
        if isinstance(request, GenerateRequest):
            stream = self._streams.get(request)
            text = None if stream is None else stream.finish()
            completion = _completion(request, FinishReason.ABORT, stream)
            self.deltas[request].append(Delta(request.index, None, None, text, completion))

    def abort_lost(self) -> None:
        """Aborts requests of adapters whose values are nowhere any more."""
        self.scheduler.switch_versions()
        for request in [*self.scheduler.waiting, *self.scheduler.running]:
            if request.adapter is not None and request.adapter.is_lost:
                self.abort(request)

    def _finish(self, request: Request) -> None:
        request.done = True
        self.scheduler.finish(request)


def _scored_chunks(batch: StepBatch) -> list[Chunk]:
    """The chunks of a batch whose tokens are scored, in order of their places."""
    prompts = batch.chunks[batch.generating :]
    return [chunk for chunk in prompts if isinstance(chunk.request, ScoreRequest)]


def _completion(
    request: GenerateRequest, reason: FinishReason, stream: TextStream | None
) -> Completion:
    return Completion(
        text=None if stream is None else stream.text,
        token_ids=list(request.generated),
        logprobs=None if request.params.logprobs is None else list(request.logprobs),
        finish_reason=reason,
        adapter=request.adapter_name,
        adapter_version=request.adapter_version,
        prompt_token_ids=request.tokens[: request.prompt_length],
        top_logprobs=list(request.top_logprobs) if request.params.logprobs else None,
        adapter_versions=None if request.adapter is None else list(request.versions),
    )
