"""What Pallas's interpreters call back with: NumPy arrays.

JAX puts each argument of a callback on a device first, and an interpreted kernel calls back for
every access to memory: that took more than half of what its tests took.
"""

from __future__ import annotations

from unittest import mock

import jax
import numpy as np
from jax._src import callback as callbacks


def plain_callbacks():
    """A context for all that an interpreter runs."""
    return mock.patch.object(callbacks, "io_callback_impl", _call)


def _call(*arguments, callback, **static):
    """JAX's own function, less the devices. Arguments are copied: they are XLA's memory."""
    del static
    return jax.tree.map(np.asarray, callback(*map(np.array, arguments)))
