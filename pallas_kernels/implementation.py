"""Modules of one operation for different compilers, imported when first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import jax

DEPENDENT_LAUNCH = jax.__version_info__ >= (0, 12)  # see `hopper.dependent_launch`
# Whether warpgroups of a kernel can give each other registers. From JAX 0.12 on Mosaic has its code
# made for linking (nvJitLink), where that is ignored: each has as many as it begins with.
REGISTERS_MOVE = jax.__version_info__ < (0, 12)


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


def serves(check: Callable, *arguments) -> bool:
    """Whether a module's check of the arguments has nothing to object to."""
    try:
        check(*arguments)
    except NotImplementedError:
        return False
    return True


def mosaic_gpu_module(package: str, implementation: str | None, *arguments) -> ModuleType | None:
    """A package's kernels for Hopper where they are asked for, or best, and serve the arguments.

    None stands for others. The module says what it serves: `check` of the arguments.

    Raises:
      NotImplementedError: they were asked for, and do not.
    """
    if (implementation or platform_implementation()) != "mosaic_gpu":
        return None
    module = implementation_module(package, "mosaic_gpu")
    if implementation is not None:
        module.check(*arguments)
        return module
    return module if serves(module.check, *arguments) else None
