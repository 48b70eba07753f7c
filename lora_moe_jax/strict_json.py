"""JSON as this library accepts it: one object in UTF-8, no key twice, no NaN."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lora_moe_jax.errors import LoraMoeError

MAX_FILE_BYTES = 64 << 20  # the index of the largest checkpoints has less than a sixth of it
DAMAGED = "the file is damaged or was not written completely; copy or save it again"


def parse_json_object(
    data: bytes, file: str | os.PathLike, error: type[LoraMoeError]
) -> dict[str, object]:
    """Parses the bytes of one JSON object, read from `file`, which only the errors mention.

    Raises:
      error: not UTF-8, not JSON, not an object, a key twice in one object, NaN or Infinity, half
        a character, or nested too deeply to be read.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in pairs:
            if key in result:
                raise error(
                    "a key occurs twice", file=file, key=key[:200], expected="each key once"
                )
            result[key] = value
        return result

    def refuse_constant(name: str) -> None:
        raise error("the text is not valid JSON", file=file, expected="finite numbers", found=name)

    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant
        )
        if b"\\u" in data:  # escapes can spell half a character, which no log could print
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as cause:
        raise error(
            "the text is not valid Unicode",
            file=file,
            expected="no lone surrogates",
            found=ascii(cause.object[cause.start : cause.end]),
        ) from cause
    except (ValueError, RecursionError) as cause:  # bad UTF-8 and bad JSON are ValueErrors
        raise error(
            "the text is not valid JSON",
            file=file,
            expected="one JSON object in UTF-8",
            found=str(cause) or type(cause).__name__,
            hint=DAMAGED,
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
    """Reads `file` as `parse_json_object` does.

    Raises:
      error: as `parse_json_object`; or it cannot be read, is no file, or is far too large.
    """
    file = Path(file)
    try:
        size = file.stat().st_size
        if not file.is_file():  # a folder; or a pipe, which would block
            raise error("this is not a file", file=file, expected="a JSON file")
        if size > MAX_FILE_BYTES:
            raise error(
                "the file is too large to be a configuration",
                file=file,
                expected=f"at most {MAX_FILE_BYTES} bytes",
                found=f"{size} bytes",
            )
        data = file.read_bytes()
    except (OSError, ValueError) as cause:  # a NUL in the path is a ValueError
        raise error(
            "the file cannot be read", file=file, expected="a JSON file", found=str(cause)
        ) from cause
    return parse_json_object(data, file, error)
