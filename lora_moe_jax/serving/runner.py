"""The loop: lays out a step, runs it, and hands each request its tokens, text and scores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from lora_moe_jax.serving.compile_guard import no_compile
from lora_moe_jax.serving.request import (
    Completion,
    Delta,
    FinishReason,
    GenerateRequest,
    Request,
    ScoreRequest,
)
from lora_moe_jax.serving.sampler import SamplingRows
from lora_moe_jax.serving.scheduler import Chunk, Scheduler, StepBatch
from lora_moe_jax.serving.steps import Steps
from lora_moe_jax.serving.text import TextCodec, TextStream


class Runner:
    """Runs requests of the scheduler through the compiled steps.

    Attributes:
      counts: steps, prompt tokens computed and tokens generated so far.
      deltas: of each unfinished request, in the order in which they came, what nobody has fetched.
    """

    def __init__(
        self,
        steps: Steps,
        scheduler: Scheduler,
        codec: TextCodec | None,
        eos_token_ids: tuple[int, ...],
        max_requests: int,
    ):
        self.steps = steps
        self.scheduler = scheduler
        self.counts = {"steps": 0, "prompt_tokens": 0, "generated_tokens": 0}
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._max_requests = max_requests
        self._streams: dict[Request, TextStream] = {}
        self.deltas: dict[Request, deque[Delta]] = {}

    def run(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Steps the engine until these requests are done; others that are running go along."""
        for request in requests:
            self.deltas[request] = deque()
            if isinstance(request, GenerateRequest) and self._codec is not None:
                self._streams[request] = TextStream(self._codec, request.params.stop)
        self.scheduler.add(requests)
        deltas = self._drain(requests)
        next(deltas)
        return deltas

    def _drain(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Yields None once, to be past the start: only then does closing it run its end."""
        try:
            yield None
            unfinished = list(requests)
            while unfinished:
                for request in list(unfinished):
                    while self.deltas[request]:
                        yield self.deltas[request].popleft()
                    if request.done:
                        unfinished.remove(request)
                if unfinished:
                    self.step()
        finally:
            for request in requests:
                self.scheduler.finish(request)
                self.deltas.pop(request, None)
                self._streams.pop(request, None)

    def step(self) -> None:
        """Runs one step of all running requests, and keeps what it makes in `deltas`."""
        batch = self.scheduler.next_batch()
        with no_compile("a step"):
            hidden = self.steps.forward(batch.device_arrays())
            self.scheduler.wrote(batch)
            self._sample(batch, hidden)
            self._score(batch, hidden)
        self.counts["steps"] += 1
        for chunk in batch.chunks:
            request = chunk.request
            inside_prompt = min(chunk.start + chunk.length, request.prompt_length) - chunk.start
            self.counts["prompt_tokens"] += max(inside_prompt, 0)
            if isinstance(request, ScoreRequest) and chunk.completes:
                self._finish(request)

    def _sample(self, batch: StepBatch, hidden: jax.Array) -> None:
        chunks = [c for c in batch.chunks if c.samples]
        if not chunks:
            return
        rows, slots, settings = _sampling_rows(chunks, self._max_requests)
        tokens, logprobs = self.steps.sample(hidden, rows, slots, settings)
        for chunk, token, logprob in zip(chunks, tokens.tolist(), logprobs.tolist(), strict=False):
            self._take_token(chunk.request, token, logprob)

    def _take_token(self, request: GenerateRequest, token: int, logprob: float) -> None:
        request.tokens.append(token)
        request.logprobs.append(logprob)
        self.counts["generated_tokens"] += 1
        stream = self._streams.get(request)
        text = None if stream is None else stream.push(token)
        reason = self._finish_reason(request, token, stream)
        completion = None
        if reason is not None:
            self._finish(request)
            text = None if stream is None else text + stream.finish()
            completion = _completion(request, reason, stream)
        shown = logprob if request.params.logprobs else None
        self.deltas[request].append(Delta(request.index, token, shown, text, completion))

    def _finish_reason(self, request, token, stream) -> FinishReason | None:
        params = request.params
        ends = () if params.ignore_eos else self._eos_token_ids
        if token in ends or token in params.stop_token_ids or (stream and stream.stopped):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(request.generated) == params.max_tokens else None

    def _score(self, batch: StepBatch, hidden: jax.Array) -> None:
        chunks = [c for c in batch.chunks if isinstance(c.request, ScoreRequest)]
        if not chunks:
            return
        targets = np.zeros(len(batch.tokens), np.int32)
        for chunk in chunks:
            after = chunk.request.tokens[chunk.start + 1 : chunk.start + chunk.length + 1]
            targets[chunk.offset : chunk.offset + len(after)] = after
        logprobs, logits = self.steps.score(hidden, batch.token_slots, targets)
        wanted = any(chunk.request.return_logits for chunk in chunks)
        logits = np.asarray(logits) if wanted else None
        for chunk in chunks:
            rows = slice(chunk.offset, chunk.offset + chunk.length)
            chunk.request.logprobs.append(logprobs[rows])
            if chunk.request.return_logits:
                chunk.request.logits.append(logits[rows])

    def _finish(self, request: Request) -> None:
        request.done = True
        self.scheduler.finish(request)


def _sampling_rows(
    chunks: Sequence[Chunk], size: int
) -> tuple[np.ndarray, np.ndarray, SamplingRows]:
    """Row numbers, slots and settings of the chunks' last rows, padded to `size` rows."""
    rows, slots = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    settings = SamplingRows(
        temperature=np.zeros(size, np.float32),
        top_k=np.zeros(size, np.int32),
        top_p=np.ones(size, np.float32),
        min_p=np.zeros(size, np.float32),
        seed=np.zeros(size, np.uint32),
        step=np.zeros(size, np.int32),
    )
    for i, chunk in enumerate(chunks):
        request, params = chunk.request, chunk.request.params
        rows[i] = chunk.offset + chunk.length - 1
        slots[i] = request.slot
        settings.temperature[i] = params.temperature
        settings.top_k[i] = params.top_k
        settings.top_p[i] = params.top_p
        settings.min_p[i] = params.min_p
        settings.seed[i] = request.seed
        settings.step[i] = len(request.generated)
    return rows, slots, settings


def _completion(
    request: GenerateRequest, reason: FinishReason, stream: TextStream | None
) -> Completion:
    return Completion(
        text=None if stream is None else stream.text,
        token_ids=list(request.generated),
        logprobs=list(request.logprobs) if request.params.logprobs else None,
        finish_reason=reason,
        adapter=request.adapter_name,
        adapter_version=request.adapter_version,
        prompt_token_ids=request.tokens[: request.prompt_length],
    )
