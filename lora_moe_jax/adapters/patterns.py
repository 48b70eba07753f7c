"""The regular expressions of an adapter's config. They come from a file: nothing trusts them."""

from __future__ import annotations

import os
import re
import time

from lora_moe_jax.errors import AdapterError

_MAX_LENGTH = 4096
_MAX_REPEATS = 5  # matching takes up to about len(name) ** repeats steps
MAX_SECONDS = 30.0
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUP_START = re.compile(r"\((?:\?(?:[:=!]|<[=!]|P?<\w+>)?)?")
_REPEAT = re.compile(r"(?:[*+?]|\{\d*,?\d*\})[?+]?")


class Matcher:
    """Compiles and matches the expressions of one config, `file`, within a limit of time."""

    def __init__(self, file: str | os.PathLike):
        self._file, self._seconds = file, 0.0

    def compile(self, pattern: str, form: str, key: str) -> re.Pattern:
        """Compiles `form.format(pattern)`. Raises `AdapterError` for a pattern that is too long,
        does not compile, or could take very long to match."""
        refused = None
        if len(pattern) > _MAX_LENGTH:
            refused = f"{len(pattern)} characters; at most {_MAX_LENGTH} are accepted"
        elif (repeats := _count_repeats(pattern)) is None:
            refused = "a group that is repeated with * or + or {}; matching it could take for ever"
        elif repeats > (limit := _MAX_REPEATS - form.count("*")):
            refused = f"{repeats} repetitions (* + ? {{}}) in a row; at most {limit} are accepted"
        try:
            if refused is None:
                re.compile(pattern)  # alone first: "a)(b" must not be repaired by the form
                return re.compile(form.format(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            refused = f"a pattern that does not compile: {error}"
        raise AdapterError(
            "a regular expression of the adapter cannot be used",
            file=self._file,
            key=key,
            expected="a short regular expression, as Python's re module reads it",
            found=f"{pattern[:120]!r}: {refused}",
        )

    def match(self, pattern: re.Pattern, name: str, *, full: bool = False) -> re.Match | None:
        """Matches `name`, or its beginning; raises `AdapterError` when time has run out."""
        start = time.monotonic()
        found = pattern.fullmatch(name) if full else pattern.match(name)
        self._seconds += time.monotonic() - start
        if self._seconds > MAX_SECONDS:
            raise AdapterError(
                "the regular expressions of the adapter take too long to match",
                file=self._file,
                key=pattern.pattern[:120],
                expected=f"at most {MAX_SECONDS} s for all names",
                found=f"more; {name} came last",
            )
        return found


def _count_repeats(pattern: str) -> int | None:
    """The most repetitions on any path through a pattern, or None if one repeats a group.

    `(...)?` counts as a repetition but is allowed: PEFT's own patterns begin with `(.*\\.)?`.
    """
    paths = [[0]]  # for each open group, the repetitions in each of its alternatives so far
    position, after_group = 0, False
    while position < len(pattern):
        character = pattern[position]
        repeat = _REPEAT.match(pattern, position)
        if repeat and position and repeat.group() != "{}":
            if after_group and character != "?":
                return None
            paths[-1][-1] += 1
            position, after_group = repeat.end(), False
            continue
        after_group = character == ")"
        end = position + 1
        if character == "\\":
            end = position + 2
        elif character == "[" and (found := _CLASS.match(pattern, position)):
            end = found.end()
        elif character == "(":
            end = _GROUP_START.match(pattern, position).end()
            paths.append([0])
        elif character == ")" and len(paths) > 1:
            inner = max(paths.pop())
            paths[-1][-1] += inner
        elif character == "|":
            paths[-1].append(0)
        position = end
    return sum(map(max, paths))
