"""Work that the mesh of a program's context is not meant for.

The library's arrays say where they are, by the engine's own mesh or none. After `jax.set_mesh`,
for a critic of the program's own perhaps, JAX would place and compile them for that mesh, and fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

_NONE = Mesh(np.empty((), object), ())


@contextlib.contextmanager
def own_placement() -> Iterator[None]:
    """Without the mesh of the context, if there is one; also a decorator."""
    with contextlib.nullcontext() if _has_none() else jax.set_mesh(_NONE):
        yield


def _has_none() -> bool:
    return jax.sharding.get_abstract_mesh().empty
