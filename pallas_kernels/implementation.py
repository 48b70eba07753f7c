"""Modules of one operation for different compilers, imported when first used."""

from __future__ import annotations

import importlib
from types import ModuleType

import jax


def platform_implementation() -> str:
    """What serves a platform best, by name: "mosaic_tpu", "mosaic_gpu" (Hopper) or "xla"."""
    platform = jax.default_backend()
    if platform == "tpu":
        return "mosaic_tpu"
    if platform == "gpu" and jax.__version_info__ >= (0, 11):
        capability = getattr(jax.devices()[0], "compute_capability", "")
        return "mosaic_gpu" if capability == "9.0" else "xla"
    return "xla"


def check_known(implementation: str | None, known: tuple[str, ...]) -> None:
    """Raises NotImplementedError for the name of an implementation that an operation has not."""
    if implementation is not None and implementation not in known:
        raise NotImplementedError(f"{implementation=} is not one of {known}")


def implementation_module(package: str, implementation: str) -> ModuleType:
    """The module `package.implementation`; a module needs parts of jax that others do not have.

    Raises:
      NotImplementedError: this jax is too old for it.
    """
    if implementation == "mosaic_gpu" and jax.__version_info__ < (0, 11):
        raise NotImplementedError(
            f"implementation='mosaic_gpu' needs jax 0.11 or later, this is {jax.__version__}"
        )
    return importlib.import_module(f"{package}.{implementation}")
