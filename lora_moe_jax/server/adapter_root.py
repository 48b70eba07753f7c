"""The one folder that adapters may be loaded from over HTTP."""

from __future__ import annotations

from pathlib import Path

from lora_moe_jax.server.errors import ApiError


def folder_inside(root: Path, path: str) -> Path:
    """The folder `path`, absolute or relative to `root`, with symbolic links followed.

    Raises:
      ApiError: 403, it or a file in it is outside of `root`, whether it exists or not; 404, it is
        not there; 400, it cannot be a path.
    """
    root = root.resolve()
    try:
        folder = (root / path).resolve()
        _check_inside(root, folder)
        if not folder.is_dir():
            message = "there is no such folder in the adapter root"
            raise ApiError(404, message, param="lora_path", code="not_found")
        for file in folder.iterdir():
            _check_inside(root, file.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a NUL in the path
        message = "lora_path is not a path that can be read"
        raise ApiError(400, message, param="lora_path") from error
    return folder


def _check_inside(root: Path, path: Path) -> None:
    if not path.is_relative_to(root):
        message = "lora_path leads out of the adapter root"
        raise ApiError(403, message, param="lora_path", code="forbidden")
