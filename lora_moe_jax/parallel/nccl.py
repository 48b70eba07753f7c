"""Whether NCCL, which moves data between GPUs, has what XLA asks of it."""

from __future__ import annotations

import ctypes
import os

import jax
from jax.sharding import Mesh

from lora_moe_jax.errors import ConfigError

LIBRARY = "libnccl.so.2"
FUNCTION = "ncclGetPeerDevicePointer"  # from NCCL 2.29 on
WITHOUT_KERNEL = "--xla_gpu_experimental_use_collective_kernels=-ALL_REDUCE"  # nobody calls it


def check_nccl(mesh: Mesh) -> None:
    """Raises ConfigError if steps on several GPUs would fail.

    From JAX 0.12 on XLA adds few rows by a kernel of its own, which reads the other GPU's memory.
    Without the function that says where that is, NCCL is "unhandled system error" in every step.
    """
    several = mesh.size > 1 and mesh.devices.flat[0].platform == "gpu"
    if not several or jax.__version_info__ < (0, 12):
        return
    library = _loaded()
    if library is None or hasattr(library, FUNCTION):
        return
    if WITHOUT_KERNEL in os.environ.get("XLA_FLAGS", "").split():
        return
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    raise ConfigError(
        "NCCL is too old for several GPUs with this JAX",
        key="mesh",
        expected=f"NCCL 2.29 or newer with JAX {jax.__version__}",
        found=f"NCCL {_shown(version.value)}",
        hint=f"pip install -U nvidia-nccl-cu13, or set XLA_FLAGS={WITHOUT_KERNEL}, or use JAX 0.11",
    )


def _loaded() -> ctypes.CDLL | None:
    """The NCCL that JAX has loaded. One that it finds later nobody can look at before."""
    try:
        return ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def _shown(version: int) -> str:
    """22809 is 2.28.9."""
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"
