"""After warm-up nothing may compile: counts compilations and turns a late one into an error."""

from __future__ import annotations

import contextlib
import threading

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class LateCompileError(RuntimeError):
    """Something compiled after warm-up."""


class _Compilations:
    """What every thread has compiled since this module was imported."""

    def __init__(self):
        self._lock = threading.Lock()
        self.by_thread: dict[int, list[str]] = {}

    def __call__(self, event: str, duration: float, **details) -> None:
        if event == _COMPILE_EVENT:
            name = str(details.get("fun_name", "a function without a name"))
            with self._lock:
                self.by_thread.setdefault(threading.get_ident(), []).append(name)

    def here(self) -> list[str]:
        """The names of this thread's compilations."""
        return self.by_thread.get(threading.get_ident(), [])

    def total(self) -> int:
        """The number of all threads' compilations."""
        with self._lock:
            return sum(map(len, self.by_thread.values()))


_compilations = _Compilations()
jax.monitoring.register_event_duration_secs_listener(_compilations)


def compile_count() -> int:
    """Functions that this process has compiled so far, by anyone."""
    return _compilations.total()


@contextlib.contextmanager
def no_compile(doing: str):
    """Raises LateCompileError if this thread compiles inside the block.

    Args:
      doing: what the block does, for the message.
    """
    before = len(_compilations.here())
    yield
    late = _compilations.here()[before:]
    if late:
        raise LateCompileError(
            f"{doing} compiled {len(late)} function(s) after warm-up: {', '.join(late)}. "
            "Every shape must be one of the engine's shape buckets."
        )
