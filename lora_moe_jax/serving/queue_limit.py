"""How many requests an engine takes at a time."""

from __future__ import annotations

from lora_moe_jax.errors import ConfigError, RequestError


class QueueFullError(RequestError):
    """Too many requests are waiting; the same request may be served later."""


def check_limit(max_waiting: int) -> None:
    """Raises ConfigError unless this is a number of requests that may wait."""
    integer = isinstance(max_waiting, int) and not isinstance(max_waiting, bool)
    if not integer or max_waiting < 0:
        raise ConfigError(
            "max_waiting is out of range",
            key="max_waiting",
            expected="an integer of at least 0",
            found=repr(max_waiting),
        )


def check_count(count: int, room: int) -> None:
    """Raises RequestError for more requests in one call than `room`, all that can be taken."""
    if count > room:
        raise RequestError(
            "too many requests in one call",
            key="prompts",
            expected=f"at most {room}",
            found=str(count),
        )


def check_room(present: int, count: int, room: int) -> None:
    """Raises QueueFullError unless `count` requests more than those that are `present` fit."""
    if present + count > room:
        raise QueueFullError(
            "too many requests are waiting",
            key="max_waiting",
            expected=f"at most {room} requests, running and waiting",
            found=f"{present}, and {count} more",
            hint="try again later",
        )
