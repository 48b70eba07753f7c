"""JSON as the standard defines it: no NaN, no duplicate keys, an object at the top."""

from __future__ import annotations

import json
import os

from lora_moe_jax.errors import AdapterError


def parse_object(data: bytes, file: str | os.PathLike, what: str) -> dict:
    """Parses `data` as one JSON object; `what` names it in the error. Raises `AdapterError`."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        settings = dict(pairs)
        if len(settings) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise AdapterError(
                f"{what} holds the same key twice", file=file, key=twice, expected="each key once"
            )
        return settings

    def no_constant(constant: str) -> None:
        raise AdapterError(
            f"{what} is not valid JSON", file=file, expected="finite numbers", found=constant
        )

    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant
        )
        if b"\\u" in data:  # escapes can spell half a character, which no log could print
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise AdapterError(
            f"{what} is not valid JSON",
            file=file,
            expected="a JSON object in UTF-8",
            found=str(error) or type(error).__name__,
            hint="the file is damaged or was not written completely; copy or save it again",
        ) from error
    if not isinstance(value, dict):
        raise AdapterError(
            f"{what} is not a JSON object",
            file=file,
            expected="an object",
            found=type(value).__name__,
        )
    return value
