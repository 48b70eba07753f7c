"""The folder that `--out` names: refused before anything is trained, not when it is written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lora_moe_jax.errors import AdapterError


def check_out(out: Path) -> None:
    """Refuses a folder that is there already, or cannot be made; makes those that it is in.

    Raises:
      AdapterError: for either.
    """
    if out.exists() or out.is_symlink():
        raise AdapterError(
            "there is something already where the adapter goes",
            file=out,
            expected="a new folder",
            hint="choose another --out, or remove it",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=out.parent).cleanup()
    except OSError as cause:
        raise AdapterError(
            "the adapter could not be written there",
            file=out,
            expected="a folder that can be made",
            found=str(cause),
            hint="choose another --out",
        ) from cause
