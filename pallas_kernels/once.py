"""Arrays that are there several times, through functions that would make them several arrays.

What goes into a function with a gradient of its own, and comes out of it, is a list of leaves: an
array that two of them are is two arrays after that, and a kernel that takes both loads it twice.
"""

from __future__ import annotations

import dataclasses
import functools

import jax


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["distinct"], meta_fields=["tree", "places"]
)
@dataclasses.dataclass(frozen=True)
class Once:
    """Values for a function's results, or arguments: an array that is there several times goes
    through as one of them, and is there several times again after it.

    Attributes:
      distinct: the arrays. tree, places: of the values, and which array each of their leaves is.
    """

    distinct: tuple
    tree: jax.tree_util.PyTreeDef
    places: tuple[int, ...]

    @classmethod
    def of(cls, values) -> Once:
        leaves, tree = jax.tree.flatten(values)
        distinct = {id(leaf): leaf for leaf in leaves}
        places = tuple(list(distinct).index(id(leaf)) for leaf in leaves)
        return cls(tuple(distinct.values()), tree, places)

    @property
    def values(self):
        return jax.tree.unflatten(self.tree, [self.distinct[place] for place in self.places])
