"""Writes an adapter folder: all of it, or nothing."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from lora_moe_jax.adapters import layouts
from lora_moe_jax.adapters.adapter import Adapter
from lora_moe_jax.adapters.check import check_adapter
from lora_moe_jax.adapters.config import CONFIG_FILE
from lora_moe_jax.adapters.packing import FORM_KEY
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.adapters.reader import TENSOR_FILE
from lora_moe_jax.checkpoint.to_disk import to_disk
from lora_moe_jax.errors import AdapterError

_LAYOUTS = {
    "peft": layouts.peft,
    "per_expert": layouts.per_expert,
    "shared_outer": layouts.shared_outer,
}
_PEFT_VERSION = "0.21.2"  # whose layout "peft" is
_REPLACEABLE = {CONFIG_FILE, TENSOR_FILE, "README.md"}


def write_adapter(
    folder: str | os.PathLike,
    adapter: Adapter,
    projections: Mapping[str, Projection],
    *,
    layout: Literal["peft", "per_expert", "shared_outer"] = "peft",
) -> None:
    """Writes `adapter` so that reading it gives the same factors, scalings and ranks.

    rsLoRA adapters are written with the alpha that gives the same scaling without rsLoRA. Parts
    that the layout must hold and the adapter does not have are written as zeros.

    Args:
      folder: is created; an adapter folder that is there already is replaced.
      adapter: what to write.
      projections: the base model's, as for `read_adapter`.
      layout: "peft" (PEFT 0.21), "per_expert" (vLLM, SGLang), or "shared_outer" (3D).

    Raises:
      AdapterError: if the layout cannot hold the adapter exactly, the adapter does not fit the
        projections, or the folder cannot be written or holds something else. Nothing is left
        behind then.
    """
    if not isinstance(folder, str | os.PathLike) or "\0" in os.fspath(folder):
        raise AdapterError(
            "an adapter is written to a folder",
            key="folder",
            expected="a path",
            found=repr(folder)[:200],
        )
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise AdapterError(
            "this is not a layout that can be written", key="layout",
            expected=", ".join(_LAYOUTS), found=layout,
        )  # fmt: skip
    check_adapter(adapter, projections)
    draft = _LAYOUTS[layout](adapter, projections)
    settings = {
        "base_model_name_or_path": adapter.config.base_model,
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "peft_version": _PEFT_VERSION,
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    } | draft.config()
    metadata = {"format": "pt"} | ({FORM_KEY: draft.form} if draft.form else {})
    _save(Path(folder), draft.tensors, json.dumps(settings, indent=2, sort_keys=True), metadata)


def _save(
    folder: Path, tensors: dict[str, np.ndarray], config: str, metadata: dict[str, str]
) -> None:
    """Fills a new folder beside `folder`, then gives it that name."""
    mark = secrets.token_hex(8)
    new, old = (folder.parent / f".{folder.name}.{mark}.{part}" for part in ("new", "old"))
    try:
        _check_replaceable(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
        (new / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
        save_file(tensors, new / TENSOR_FILE, metadata)
        shutil.copymode(new / CONFIG_FILE, new / TENSOR_FILE)  # the library keeps others out
        to_disk(new)
        _replace(folder, new, old)
    except (OSError, SafetensorError) as error:
        raise AdapterError("the adapter cannot be written", file=folder, found=error) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


def _replace(folder: Path, new: Path, old: Path) -> None:
    if not folder.exists():
        new.rename(folder)
        return
    try:
        folder.rename(old)
        new.rename(folder)
    except BaseException:  # an interrupt, too
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise


def _check_replaceable(folder: Path) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    found = "a file or a link"
    if folder.is_dir() and not folder.is_symlink():
        names = set(os.listdir(folder))
        if not names or (CONFIG_FILE in names and names <= _REPLACEABLE):
            return
        found = "a folder with " + ", ".join(sorted(names - _REPLACEABLE or names)[:8])
    raise AdapterError(
        "the folder is not one that may be replaced", file=folder,
        expected="nothing, an empty folder, or an adapter with no other files beside it",
        found=found, hint="choose another folder",
    )  # fmt: skip
