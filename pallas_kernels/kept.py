"""Values of a forward pass that cost more to compute again than to keep for the gradient.

`jax.checkpoint` with `policy=KEPT` keeps these alone, beside a function's arguments: what products
and attention make. Norms, activations, routing and gathers are computed again.
"""

from __future__ import annotations

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
