"""JSON as this library accepts it: one object, no key twice, no NaN."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lora_moe_jax.errors import LoraMoeError


def parse_json_object(
    data: bytes, file: str | os.PathLike, error: type[LoraMoeError]
) -> dict[str, object]:
    """Parses the bytes of one JSON object, read from `file`, which only the errors mention.

    Raises:
      error: not UTF-8, not JSON, not an object, a key twice in one object, NaN or Infinity,
        or nested too deeply to be read.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in pairs:
            if key in result:
                raise error("a key occurs twice", file=file, key=key, expected="each key once")
            result[key] = value
        return result

    def refuse_constant(name: str) -> None:
        raise error("a number is not finite", file=file, expected="JSON numbers", found=name)

    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as cause:  # bad UTF-8 and bad JSON are ValueErrors
        raise error(
            "the text is not JSON", file=file, expected="one JSON object", found=str(cause)
        ) from cause
    if not isinstance(value, dict):
        raise error(
            "the text is not a JSON object",
            file=file,
            expected="one JSON object",
            found=type(value).__name__,
        )
    return value


def read_json_object(file: str | os.PathLike, error: type[LoraMoeError]) -> dict[str, object]:
    """Reads `file` as `parse_json_object` does; a file that cannot be read raises `error` too."""
    try:
        data = Path(file).read_bytes()
    except (OSError, ValueError) as cause:  # a NUL in the path is a ValueError
        raise error(
            "the file cannot be read", file=file, expected="a JSON file", found=str(cause)
        ) from cause
    return parse_json_object(data, file, error)
