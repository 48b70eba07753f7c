"""Four CPU devices for the mesh tests, all else runs on the first; and which kernels to test."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)

# What one process has compiled, the others (workers, and programs that tests run) find on disk.
COMPILED = {
    "jax_compilation_cache_dir": str(Path(__file__).parents[1] / ".jax_cache"),
    "jax_persistent_cache_min_compile_time_secs": 0.1,
}
for option, value in COMPILED.items():
    jax.config.update(option, value)
    os.environ[option.upper()] = str(value)


@pytest.fixture(scope="session")
def implementation() -> str:
    """What the tests of correctness run: the platform's own kernels."""
    return {"cpu": "xla", "gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}[jax.default_backend()]
