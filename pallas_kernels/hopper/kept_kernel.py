"""Kernels that are lowered once: by a process, and by those after it.

Lowering a Mosaic kernel is Python, half a second to three for each, one after the other, and most
of what an engine or a trainer waits for when it starts. JAX keeps what XLA has compiled, by what
was lowered; so this keeps what is lowered, by what a kernel is made of: its function with its
static arguments, its memory, its operands' types, the source of this package and JAX's version.

A lowered kernel (`jax.export`) is in memory, and a file beside JAX's persistent cache where that is
on, and in a file system (kernels of a `gs://` folder are lowered by each process).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import hashlib
import os
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import implementation

PLATFORM, CALL = "cuda", "mosaic_gpu_v2"
FOLDER = "lowered_kernels"  # in that of the persistent cache
DIGEST = 32  # bytes, before what they are of
_lowered: dict[str, export.Exported] = {}
_keeps = contextvars.ContextVar("keeps", default=True)


def kept_kernel(body: Callable, *, out_type, **options) -> Callable:
    """`plgpu.kernel`, lowered once for the same body, options, and types of operands.

    Args:
      body: a function, of which all that it has from outside is static: numbers, text, types,
        and objects, tuples, and functions of these.

    Raises:
      TypeError: the body, or an option, has something from outside that nothing can be kept by.
    """
    direct = plgpu.kernel(body, out_type=out_type, **options)
    if not is_kept():
        return direct

    def kept(*operands):
        leaves, tree = jax.tree.flatten(operands)
        avals = [jax.ShapeDtypeStruct(its.shape, its.dtype) for its in map(jax.typeof, leaves)]
        made_of = body, out_type, options, tree, avals

        def flat(*leaves):
            return jax.tree.leaves(direct(*jax.tree.unflatten(tree, leaves)))

        found = _find(_key(made_of), lambda: _lower(flat, avals))
        return jax.tree.unflatten(jax.tree.structure(out_type), found.call(*leaves))

    return kept


def is_kept() -> bool:
    """Whether kernels are: on GPUs, but not inside of `nothing_kept`, nor where one is to see what
    becomes of them."""
    shown = any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ)
    return _keeps.get() and jax.default_backend() == "gpu" and not shown


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Inside, each kernel is lowered for itself, or interpreted: to measure, or to look into it."""
    before = _keeps.set(False)
    try:
        yield
    finally:
        _keeps.reset(before)


def _lower(function: Callable, avals: list[jax.ShapeDtypeStruct]) -> export.Exported:
    known = [export.DisabledSafetyCheck.custom_call(CALL)]
    return export.export(jax.jit(function), platforms=[PLATFORM], disabled_checks=known)(*avals)


def _find(key: str, lower: Callable[[], export.Exported]) -> export.Exported:
    """The lowered kernel of a key, from memory, from a file, or else made and stored there."""
    if key not in _lowered:
        path = _path(key)
        found = path and _read(path)
        if found is None:
            found = lower()
            if path:
                _write(path, found)
        _lowered[key] = found
    return _lowered[key]


def _path(key: str) -> Path | None:
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache or "://" in folder:
        return None
    return Path(folder) / FOLDER / key


def _read(path: Path) -> export.Exported | None:
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return _warn(f"a lowered kernel cannot be read: {error}")
    digest, module = stored[:DIGEST], stored[DIGEST:]
    if hashlib.sha256(module).digest() != digest:
        return _warn(f"{path} is damaged: its kernel is lowered again")
    return export.deserialize(bytearray(module))


def _write(path: Path, lowered: export.Exported) -> None:
    """Whole or not at all: other processes may read it, or write the same."""
    module = bytes(lowered.serialize())
    own = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(hashlib.sha256(module).digest() + module)
        own.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            own.unlink()
        _warn(f"a lowered kernel cannot be kept: {error}")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _key(made_of) -> str:
    own = implementation.DEPENDENT_LAUNCH, implementation.REGISTERS_MOVE
    settings = *own, jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    versions = jax.__version__, jaxlib.__version__, _source()
    return hashlib.sha256(spelled((made_of, settings, versions)).encode()).hexdigest()


@functools.cache
def _source() -> str:
    """A hash of this package's source, of which any line may change a kernel."""
    package = Path(implementation.__file__).parent
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        whole.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def spelled(value: Any) -> str:
    """A value in words: two that differ in anything that a kernel could see have different words.

    Raises:
      TypeError: for values of which that cannot be said, such as arrays.
    """
    match value:
        case (
            None | bool() | int() | float() | str() | bytes() | range() | np.generic() | np.dtype()
        ):
            return repr(value)
        case enum.Enum():
            return f"{_name(type(value))}.{value.name}"
        case type():
            return _name(value)
        case jax.ShapeDtypeStruct() | jax.core.ShapedArray():
            return f"{value.dtype}{list(value.shape)}"
        case tuple() | list():
            return f"{_name(type(value))}({_joined(value)})"
        case dict():
            return f"dict({_joined(sorted(value.items()))})"
        case functools.partial():
            return f"partial({_joined((value.func, value.args, value.keywords))})"
        case types.MethodType():
            return f"method({_joined((value.__func__, value.__self__))})"
        case types.FunctionType():
            cells = (cell.cell_contents for cell in value.__closure__ or ())
            outside = _place(value.__code__), *cells, value.__defaults__, value.__kwdefaults__
            return f"{_name(value)}({_joined(outside)})"
        case jax.tree_util.PyTreeDef():
            return str(value)
    if dataclasses.is_dataclass(value):
        own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        own = {} if isinstance(value, jax.core.Tracer) else getattr(value, "__dict__", {})
        if not own:
            raise TypeError(f"a kernel cannot be kept by {value!r} ({_name(type(value))})")
    return f"{_name(type(value))}({spelled(own)})"


def _place(code: types.CodeType) -> str:
    """What tells lambdas of one function apart, which have one name: where they are in the source.

    And their constants: Python 3.12 does not know in which columns one is that is returned.
    """
    constants = [its for its in code.co_consts if not isinstance(its, types.CodeType | frozenset)]
    return hashlib.sha256(repr((*code.co_positions(), constants)).encode()).hexdigest()


def _joined(values) -> str:
    return ", ".join(map(spelled, values))


def _name(its) -> str:
    return f"{its.__module__}.{its.__qualname__}"
