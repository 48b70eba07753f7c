"""The regular expressions of an adapter's config. They come from a file: nothing trusts them.

What can be matched is what Python's `re` reads, by a library that gives up after a while, and lets
other threads go on meanwhile: for some expressions matching would take for ever.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from lora_moe_jax.errors import AdapterError

if TYPE_CHECKING:
    import regex

_MAX_LENGTH = 4096
MAX_SECONDS = 30.0


class Matcher:
    """Compiles and matches the expressions of one config, `file`, within a limit of time."""

    def __init__(self, file: str | os.PathLike):
        self._file, self._seconds = file, MAX_SECONDS

    def compile(self, pattern: str, form: str, key: str) -> regex.Pattern:
        """Compiles `form.format(pattern)`. Raises `AdapterError` for a pattern that is too long or
        does not compile."""
        import regex  # few adapters have an expression

        refused = f"{len(pattern)} characters; at most {_MAX_LENGTH} are accepted"
        try:
            if len(pattern) <= _MAX_LENGTH:
                re.compile(pattern)  # alone first: "a)(b" must not be repaired by the form
                return regex.compile(form.format(pattern))
        except (re.error, regex.error, OverflowError, RecursionError) as error:
            refused = f"a pattern that does not compile: {error}"
        raise AdapterError(
            "a regular expression of the adapter cannot be used",
            file=self._file,
            key=key,
            expected="a short regular expression, as Python's re module reads it",
            found=f"{pattern[:120]!r}: {refused}",
        )

    def match(self, pattern: regex.Pattern, name: str, *, full: bool = False) -> regex.Match | None:
        """Matches `name`, or its beginning; raises `AdapterError` when time has run out."""
        start = time.monotonic()
        match = pattern.fullmatch if full else pattern.match
        try:
            return match(name, timeout=self._seconds, concurrent=True)
        except TimeoutError as error:
            raise AdapterError(
                "the regular expressions of the adapter take too long to match",
                file=self._file,
                key=pattern.pattern[:120],
                expected=f"at most {MAX_SECONDS} s for all names",
                found=f"more; {name} came last",
            ) from error
        finally:
            self._seconds = max(self._seconds - (time.monotonic() - start), 1e-3)
