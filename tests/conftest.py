"""Four CPU devices for the mesh tests, all else runs on the first; and which kernels to test."""

from __future__ import annotations

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(scope="session")
def implementation() -> str:
    """What the tests of correctness run: the platform's own kernels."""
    return {"cpu": "xla", "gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}[jax.default_backend()]
