"""The engine for asyncio: one thread runs it, any number of tasks use it at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Literal, TypeVar

from lora_moe_jax.adapters import Adapter
from lora_moe_jax.adapters.entry import AdapterInfo
from lora_moe_jax.serving import validate
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.intake import Prompt
from lora_moe_jax.serving.options import EngineOptions
from lora_moe_jax.serving.queue_limit import check_count, check_limit, check_room
from lora_moe_jax.serving.request import Delta, Request, Score, scores
from lora_moe_jax.serving.sampling_params import SamplingParams
from lora_moe_jax.serving.stats import EngineStats
from lora_moe_jax.serving.stream import RequestStream
from lora_moe_jax.serving.text import TextCodec
from lora_moe_jax.serving.workers import EngineClosedError, Workers

DEFAULT_MAX_WAITING = 256

T = TypeVar("T")


class AsyncEngine:
    """Runs an `Engine` in a thread of its own; from then on nobody else may use it.

    Calls are independent of each other and share the engine's steps (continuous batching). Close
    it with `close`, or use it with `async with`.

    Args:
      engine: the engine; it stays the caller's.
      max_waiting: most requests that may wait for one of the engine's `max_requests` places.

    Raises:
      ConfigError: `max_waiting` is negative.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = DEFAULT_MAX_WAITING):
        check_limit(max_waiting)
        self.max_waiting = max_waiting
        self._engine = engine
        self._workers = Workers()
        self._calls: list[_Call] = []  # the engine's thread alone touches them
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._closing = threading.Lock()  # nothing is put behind the command that stops
        self._closed = False
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="lora_moe_jax engine", daemon=True)
        self._thread.start()

    @property
    def options(self) -> EngineOptions:
        """The engine's sizes."""
        return self._engine.options

    @property
    def codec(self) -> TextCodec | None:
        """The model's tokenizer and chat template, usable from any thread."""
        return self._engine.codec

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        lost = self._engine._runner.steps.lost
        return not self._closed and not lost and self._thread.is_alive()

    # Requests

    def check_count(self, count: int) -> None:
        """Raises RequestError for more requests in one call than could ever be taken."""
        check_count(count, self._room())

    def _room(self) -> int:
        return self.options.max_requests + self.max_waiting

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Delta]:
        """One request's tokens as they come. Closing the iterator ends the request.

        Raises:
          RequestError: it cannot be served, or (QueueFullError) not now.
        """
        with await self.stream([prompt], params, [adapter], priority) as deltas:
            async for delta in deltas:
                yield delta

    async def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapters: Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> DeltaStream:
        """`Engine.stream`: all requests are taken, or none. Use the result with `with`.

        Texts become tokens beside the engine's steps: a call with a long one comes after those
        whose tokens are there before.

        Raises:
          RequestError: at once; a request cannot be served, or (QueueFullError) not now.
        """
        prompts = await self.encoded(prompts, "prompts")
        return await self._stream(
            prompts, lambda: self._engine.stream(prompts, params, adapters, priority)
        )

    async def encoded(self, prompts: Sequence[Prompt], key: str) -> Sequence[list[int]]:
        """Token ids in place of texts, made beside the engine's steps; `key` is what errors say.

        Raises:
          RequestError: there are too many, or there is no tokenizer.
        """
        texts = isinstance(prompts, list | tuple) and [p for p in prompts if isinstance(p, str)]
        if not texts:
            return prompts
        self.check_count(len(prompts))
        encode = functools.partial(self._engine._intake.encoded, prompts, key)
        return await self._workers.with_text(encode, sum(map(len, texts)))

    async def chat(self, messages: Sequence[Mapping]) -> list[int]:
        """`TextCodec.chat`, beside the engine's steps."""
        codec = self._engine._intake.text_codec("messages")
        return await self._workers.with_text(
            functools.partial(codec.chat, messages), len(str(messages))
        )

    async def _stream(self, prompts, open_stream: Callable[[], RequestStream]) -> DeltaStream:
        call = _Call()
        try:
            await self._run(lambda: self._open(call, prompts, open_stream))
        except asyncio.CancelledError:
            self._end(call)
            raise
        stream = DeltaStream(call, self._end, self._abort)
        # One that is dropped, wherever the collector finds it: this queue's `put` may be there.
        forget = functools.partial(self._forget, call), Future()
        weakref.finalize(stream, self._commands.put, forget).atexit = False
        return stream

    async def score(
        self,
        token_ids: Sequence[Prompt],
        adapters: Sequence[str | None] | None = None,
        return_logits: bool = False,
        top_logprobs: int = 0,
        priority: int | Sequence[int] = 0,
    ) -> list[Score]:
        """`Engine.score`. Cancelling it ends the requests.

        Raises:
          RequestError: it cannot be served, was aborted by `sleep`, or (QueueFullError) not now.
        """
        token_ids = await self.encoded(token_ids, "token_ids")
        arguments = token_ids, adapters, return_logits, top_logprobs, priority
        stream = self._stream(token_ids, lambda: self._engine._open_scores(*arguments))
        with await stream as deltas:
            async for _ in deltas:
                raise AssertionError("scoring yields no tokens")
        return scores(deltas.requests)

    # Adapters and counters

    async def load_adapter(self, name: str, source: str | os.PathLike | Adapter) -> AdapterInfo:
        """`Engine.load_adapter`; it is read, checked and copied while the engine goes on."""
        await self._run(lambda: self._engine._check_new_version(name))
        copy = functools.partial(self._engine._host_copy, source)
        adapter = await self._workers.with_file(copy)
        return await self._run(lambda: self._engine._add_adapter(name, adapter))

    async def update_adapter(self, name: str, params) -> AdapterInfo:
        """`Engine.update_adapter`."""
        return await self._run(lambda: self._engine.update_adapter(name, params))

    async def unload_adapter(self, name: str, when_busy: str = "refuse") -> None:
        """`Engine.unload_adapter`."""
        await self._run(lambda: self._engine.unload_adapter(name, when_busy))

    async def pin_adapter(self, name: str) -> AdapterInfo:
        """`Engine.pin_adapter`."""
        return await self._run(lambda: self._engine.pin_adapter(name))

    async def unpin_adapter(self, name: str) -> AdapterInfo:
        """`Engine.unpin_adapter`."""
        return await self._run(lambda: self._engine.unpin_adapter(name))

    async def adapters(self) -> list[AdapterInfo]:
        """`Engine.adapters`."""
        return await self._run(self._engine.adapters)

    async def stats(self) -> EngineStats:
        """`Engine.stats`."""
        return await self._run(self._engine.stats)

    async def sleep(self, level: Literal[1, 2] = 1, abort: bool = False) -> None:
        """`Engine.sleep`; streams of requests that it aborts end."""
        await self._run(lambda: self._sleep(level, abort))

    async def wake(self) -> None:
        """`Engine.wake`."""
        await self._run(self._engine.wake)

    # The end

    def close(self) -> None:
        """Ends open requests with EngineClosedError and waits until the thread is done."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._commands.put((self._stop, Future()))
        self._workers.close()
        self._thread.join()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error) -> None:
        await asyncio.to_thread(self.close)

    # Tasks hand commands to the thread

    async def _run(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises in the engine's thread."""
        future: Future = Future()
        self._put(function, future)
        return await asyncio.wrap_future(future)

    def _put(self, function: Callable, future: Future) -> None:
        with self._closing:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            self._commands.put((function, future))

    def _end(self, call: _Call) -> None:
        with contextlib.suppress(EngineClosedError):  # then it has ended already
            self._put(lambda: self._forget(call), Future())

    def _abort(self, call: _Call, index: int | None) -> None:
        call.stream.check(index)
        with contextlib.suppress(EngineClosedError):
            self._put(lambda: self._abort_now(call, index), Future())

    # From here on everything runs in the engine's thread

    def _work(self) -> None:
        while not self._stopped:
            self._run_commands()
            if self._calls:
                self._step()

    def _run_commands(self) -> None:
        """Runs those that have come; waits for one where there is nothing else to do."""
        for _ in range(max(self._commands.qsize(), 0 if self._calls else 1)):
            _run_command(*self._commands.get())

    # The engine's own `stream` steps whenever it has nothing to hand over, which suits one reader.
    # Here the steps are the loop's, so it takes each request's tokens from where the runner keeps
    # them until they are fetched, and uses the stream only to end the requests.

    def _step(self) -> None:
        try:
            self._engine._runner.step()
        except Exception as error:  # whatever it is, those who wait must hear of it
            self._fail(error)
        self._hand_over()

    def _hand_over(self) -> None:
        for call in list(self._calls):
            with self._engine._runner.lock:
                ended = call.hand_over()
            if ended:
                self._forget(call)

    def _open(self, call: _Call, prompts, open_stream: Callable[[], RequestStream]) -> None:
        count = len(validate.sequence_of_prompts(prompts))
        self.check_count(count)
        runner = self._engine._runner
        check_room(runner.scheduler.unfinished, count, self._room())
        call.stream = open_stream()
        call.unread = [runner.deltas[request] for request in call.stream.requests]
        self._calls.append(call)
        self._hand_over()  # it may be of no requests

    def _abort_now(self, call: _Call, index: int | None) -> None:
        if call in self._calls:
            call.stream.abort(index)
            self._hand_over()

    def _sleep(self, level: int, abort: bool) -> None:
        self._engine.sleep(level, abort)
        self._hand_over()  # what was aborted

    def _forget(self, call: _Call) -> None:
        if call in self._calls:
            self._calls.remove(call)
            call.stream.close()

    def _fail(self, error: Exception) -> None:
        for call in list(self._calls):
            self._forget(call)
            call.tell(error)

    def _stop(self) -> None:
        self._fail(EngineClosedError("the engine was closed"))
        self._stopped = True


def _run_command(function: Callable, future: Future) -> None:
    """A function of its own: what a command holds, an adapter perhaps, goes when it is done."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except Exception as error:  # whatever it is, it is the caller's, not the thread's
        future.set_exception(error)
    else:
        future.set_result(result)


class _Call:
    """The requests of one `stream`, between the engine's thread and the task that reads them.

    Attributes:
      stream: the engine's, which ends them.
      unread: where the engine puts each one's deltas.
      items: deltas on their way to the task; then None, or the error that ended them.
    """

    def __init__(self):
        self.stream: RequestStream | None = None
        self.unread: list[deque[Delta]] = []
        self.items: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_deserted = False

    def hand_over(self) -> bool:
        """Hands over what has come; whether that was the last, or nobody is there to take it."""
        for unread in self.unread:
            while unread:
                self.tell(unread.popleft())
        done = all(request.done for request in self.stream.requests)
        if done:
            self.tell(None)
        return done or self._is_deserted

    def tell(self, item: Delta | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:  # the task's loop has ended, and the task with it
            self._is_deserted = True


class DeltaStream:
    """Deltas of the requests of one call as they come. Closing or dropping it ends the requests."""

    def __init__(
        self,
        call: _Call,
        end: Callable[[_Call], None],
        abort: Callable[[_Call, int | None], None],
    ):
        self._call = call
        self._end = end
        self._abort = abort
        self._ended = False

    @property
    def requests(self) -> tuple[Request, ...]:
        """In the order of the prompts; the engine's thread has them until the deltas end."""
        return self._call.stream.requests

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        item = None if self._ended else await self._call.items.get()
        if isinstance(item, Delta):
            return item
        self._ended = True
        if item is None:
            raise StopAsyncIteration
        raise item

    def abort(self, index: int | None = None) -> None:
        """`RequestStream.abort`; the last deltas come with the others."""
        self._abort(self._call, index)

    def close(self) -> None:
        """Ends the requests that are not done; harmless when all are."""
        if not self._ended:
            self._ended = True
            self._end(self._call)

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(self, *error) -> None:
        self.close()
