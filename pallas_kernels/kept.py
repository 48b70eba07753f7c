"""Values of a forward pass that cost more to compute again than to keep for the gradient.

`jax.checkpoint` with `policy=KEPT` keeps these alone, beside a function's arguments: what products
and attention make. Norms, activations, routing and gathers are computed again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

_NAME = "kept"
KEPT = jax.checkpoint_policies.save_only_these_names(_NAME)


def kept(values):
    """The same values, under the name that `KEPT` knows."""
    return map_once(lambda x: checkpoint_name(x, _NAME), values)


def map_once(function, values):
    """`jax.tree.map` that calls the function once for an array that is there several times."""
    found = {}

    def of(x):
        if id(x) not in found:
            found[id(x)] = function(x)
        return found[id(x)]

    return jax.tree.map(of, values)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Once:
    """Values for a function's results, or for what it keeps: an array that is there several times
    is one of them, and there several times again after it."""

    values: Any

    def tree_flatten(self):
        leaves, tree = jax.tree.flatten(self.values)
        distinct = {id(leaf): leaf for leaf in leaves}
        places = tuple(list(distinct).index(id(leaf)) for leaf in leaves)
        return tuple(distinct.values()), (tree, places)

    @classmethod
    def tree_unflatten(cls, known, distinct):
        tree, places = known
        return cls(jax.tree.unflatten(tree, [distinct[place] for place in places]))
