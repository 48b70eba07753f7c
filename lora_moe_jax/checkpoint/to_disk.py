"""Files that are on the disk, not only written: a rename that follows cannot overtake them."""

from __future__ import annotations

import os
from pathlib import Path


def to_disk(folder: Path) -> None:
    """Brings a folder to the disk, with all that is in it."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))


def sync(path: Path) -> None:
    """Brings a file to the disk, or the names of a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
