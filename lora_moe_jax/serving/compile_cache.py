"""Keeps compiled steps on disk, so that the next start with the same shapes is quick."""

from __future__ import annotations

import os
from pathlib import Path

import jax

SHORTEST_COMPILE_SECONDS = 0.2


def use_compile_cache() -> None:
    """Turns JAX's persistent compilation cache on, unless the user has set it up already.

    `pallas_kernels` keeps the kernels that it has lowered there as well.

    The folder is `lora_moe_jax` in XDG_CACHE_HOME (default: ~/.cache). JAX_COMPILATION_CACHE_DIR
    or `jax.config` choose another; JAX_ENABLE_COMPILATION_CACHE=false turns it off.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(home) / "lora_moe_jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_COMPILE_SECONDS)
