"""What `Engine.stream` returns: the deltas of its requests, and ways to end them early."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from lora_moe_jax.errors import RequestError
from lora_moe_jax.serving.request import Delta, Request
from lora_moe_jax.serving.runner import Runner


class RequestStream:
    """An iterator over deltas as they come. Closing or dropping it ends the requests silently.

    Attributes:
      requests: in the order of the prompts.
    """

    def __init__(self, runner: Runner, requests: Sequence[Request]):
        self.requests = tuple(requests)
        self._runner = runner
        self._deltas = runner.run(self.requests)
        weakref.finalize(self, runner.dropped.append, self.requests).atexit = False

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> Delta:
        return next(self._deltas)

    def abort(self, index: int | None = None) -> None:
        """Ends one request, or all of them, waiting or running; those that are done stay so.

        What an aborted one has is freed at once. Its last delta has no token, and a completion with
        what it had generated and the finish reason "abort".

        Raises:
          RequestError: there is no request of this index.
        """
        self.check(index)
        for request in self.requests if index is None else [self.requests[index]]:
            self._runner.abort(request)

    def check(self, index: int | None) -> None:
        """Raises RequestError unless it is None or there is such a request."""
        if index is not None and index not in range(len(self.requests)):
            raise RequestError(
                "there is no request of this index",
                key="index",
                expected=f"None, or an integer from 0 to {len(self.requests) - 1}",
                found=repr(index)[:200],
            )

    def close(self) -> None:
        """Ends the requests that are not done; harmless when all are."""
        self._deltas.close()
        self._runner.forget(self.requests)  # which closing alone leaves to the finalizer

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *error) -> None:
        self.close()
