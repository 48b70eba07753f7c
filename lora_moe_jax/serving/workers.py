"""Threads for what an engine's steps are not to wait for: texts that become tokens, and files."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import TypeVar

from lora_moe_jax.errors import RequestError

LONG_TEXT = 64 * 1024  # characters; some ten times as many take a second

T = TypeVar("T")


class EngineClosedError(RequestError):
    """The engine was closed before the request was done."""


class Workers:
    """Threads of an engine's own: asyncio's few are everybody's, and one file may keep one long.

    Short texts do not wait for long ones, nor either for files.
    """

    def __init__(self):
        self._short_texts = ThreadPoolExecutor(4, "lora_moe_jax texts")
        self._long_texts = ThreadPoolExecutor(1, "lora_moe_jax long texts")
        self._files = ThreadPoolExecutor(2, "lora_moe_jax files")
        self._lock = threading.Lock()
        self._waiting: set[Future] = set()
        self._closed = False

    async def with_text(self, work: Callable[[], T], length: int) -> T:
        """What `work` returns or raises, which reads so many characters."""
        return await self._run(self._short_texts if length < LONG_TEXT else self._long_texts, work)

    async def with_file(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, which reads a file."""
        return await self._run(self._files, work)

    def close(self) -> None:
        """Who waits for work is told EngineClosedError; what has begun ends by itself."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for future in waiting:
            _tell(future.set_exception, EngineClosedError("the engine was closed"))
        for pool in (self._short_texts, self._long_texts, self._files):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        future: Future = Future()
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            self._waiting.add(future)
            pool.submit(_work, work, future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            with self._lock:
                self._waiting.discard(future)


def _work(work: Callable, future: Future) -> None:
    if future.done():  # nobody waits for it any more
        return
    try:
        result = work()
    except Exception as error:  # whatever it is, it is the caller's, not the thread's
        _tell(future.set_exception, error)
    else:
        _tell(future.set_result, result)


def _tell(tell: Callable, outcome) -> None:
    """The outcome, unless there is one already."""
    with contextlib.suppress(InvalidStateError):
        tell(outcome)
