"""Ctrl-C comes between operations, not within one, where it would leave the books half-written.

Python acts on it when the call that it came in returns: from a step, that is when the cache has
been donated to the device and what it gave back is not yet in its place.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds an interrupt (SIGINT) back until the block has ended.

    In threads, which get none, and where Python does not handle it, nothing is done.
    """
    elsewhere = threading.current_thread() is not threading.main_thread()
    handler = None if elsewhere else signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    held: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *details: held.append(details))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
