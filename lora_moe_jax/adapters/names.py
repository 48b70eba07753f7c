"""The names adapters go by: safe as a file name, a log field, and a URL segment."""

from __future__ import annotations

import re

from lora_moe_jax.errors import AdapterError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_name(name: str) -> str:
    """Returns `name` if it may name an adapter, else raises `AdapterError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise AdapterError(
            "this cannot name an adapter",
            key="name",
            expected="1 to 128 of the characters A-Z a-z 0-9 . _ - and not '.' or '..'",
            found=ascii(name)[:200],
        )
    return name
