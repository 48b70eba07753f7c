"""The exceptions of the library: what a user did wrong, where, and what to do about it.

Every refusal says the same five things when they are known: the file, the key in it, what was
expected, what was found, and what to do. All of them are raised before anything changes.
"""

from __future__ import annotations

import os


class LoraMoeError(Exception):
    """Base of every error raised on bad input.

    Args:
      message: one sentence that says what is wrong.
      file: the file or folder it was found in.
      key: the tensor name, configuration field, or argument.
      expected: what would have been accepted.
      found: what is there.
      hint: what the user can do.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike | None = None,
        key: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ):
        self.message = message
        self.file = None if file is None else os.fspath(file)
        self.key = key
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        details = [
            f"{label}: {value}"
            for label, value in (
                ("file", self.file),
                ("key", self.key),
                ("expected", self.expected),
                ("found", self.found),
                ("what to do", self.hint),
            )
            if value is not None
        ]
        return "\n  ".join([self.message, *details])


class AdapterError(LoraMoeError):
    """An adapter that cannot be served exactly, or an unknown adapter."""


class AdapterBusyError(AdapterError):
    """An adapter that unfinished requests use."""


class CheckpointError(LoraMoeError):
    """A base checkpoint whose files are missing, damaged, or not what its configuration says."""


class ConfigError(LoraMoeError):
    """A model configuration, mesh, or engine setting that is missing, wrong, or not supported."""


class RequestError(LoraMoeError):
    """A request that can never be served: bad token ids, too long, unknown adapter."""
