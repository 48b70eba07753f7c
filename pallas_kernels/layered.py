"""One layer's part of an array that holds many layers', read by kernels where it is.

With such operands the layers of a model can be one loop: its body is compiled once, and nothing is
copied, as kernels get the whole array and the layer's number. Whatever else is done with one takes
a copy of the layer's part, as `jnp.asarray` does.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYER_OPERANDS = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layered:
    """`stack[layer + offset]`, without taking it.

    All that are given to one function together are of one layer: of the same number. Kernels may
    read it while the kernel before still runs: neither the stack nor the number may come from that.

    Attributes:
      stack: `[layers, *shape]`.
      layer, offset: int32 scalars. Of several layers in one turn of a loop the first may be the
        same: kernels add them, so that the number of each is not computed before.
    """

    stack: jax.Array
    layer: jax.Array | int
    offset: jax.Array | int = 0

    @property
    def number(self) -> jax.Array | int:
        """Of the layer: an int32 scalar, or an int."""
        return self.layer + self.offset

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """Of the part."""
        return self.stack.ndim - 1

    @property
    def dtype(self) -> np.dtype:
        """Of the whole array."""
        return self.stack.dtype

    def reshape(self, *shape: int) -> Layered:
        """The part in another shape."""
        stack = self.stack.reshape(self.stack.shape[0], *shape)
        return dataclasses.replace(self, stack=stack)

    def astype(self, dtype: jax.typing.DTypeLike) -> Layered | jax.Array:
        """The part itself where it has the dtype."""
        return self if self.dtype == dtype else jnp.asarray(self).astype(dtype)

    def __getitem__(self, key):
        if key is ...:
            return self
        return jnp.asarray(self)[key]

    def __jax_array__(self) -> jax.Array:
        return lax.dynamic_index_in_dim(self.stack, self.number, keepdims=False)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.stack[self.number], dtype)


def is_layered(value) -> bool:
    """For `jax.tree` functions that take each as a whole."""
    return isinstance(value, Layered)


def without_layers(tree):
    """A tree with copies of the parts in place of what is `Layered`."""
    take = lambda leaf: jnp.asarray(leaf) if is_layered(leaf) else leaf  # noqa: E731
    return jax.tree.map(take, tree, is_leaf=is_layered)


def layer_of(*arrays) -> jax.Array | None:
    """The number, int32 [1], of those that are `Layered`; None if none is.

    Raises:
      ValueError: they are of different layers, as far as the numbers are known.
    """
    operands = layer_operands(*arrays)
    return sum(operands) if operands else None


def layer_operands(*arrays) -> tuple[jax.Array, ...]:
    """The same for a kernel that adds itself, see `number_of`: two int32 [1], or nothing."""
    layers = [array for array in arrays if is_layered(array)]
    if not layers:
        return ()
    known = {its.number for its in layers if isinstance(its.number, int)}
    if len(known) > 1:
        raise ValueError(f"arrays of one call must be of one layer, got those of {sorted(known)}")
    first = layers[0]
    return tuple(jnp.asarray(its, jnp.int32).reshape(1) for its in (first.layer, first.offset))


def number_of(layer):
    """The number in a kernel's references to `layer_operands`; 0 where there are none."""
    return sum((its[0] for its in layer), start=jnp.int32(0))


def as_stack(array) -> jax.Array:
    """`[layers, *shape]`; of an array that has no layers, the stack of it alone."""
    return array.stack if is_layered(array) else array[None]


def merged(array):
    """A part as rows of one array: (`[layers * n, ...]`, n). (array, 0) of one that has no layers.

    The part's first row is `layer * n`.
    """
    if not is_layered(array):
        return array, 0
    count, *rest = array.shape
    return array.stack.reshape(-1, *rest), count
