"""Layers that differ in nothing but their weights are traced and lowered once.

The compiler gets one function with a call for each layer, and then sees all layers as one program:
nothing is copied, and nothing is slower than with layers written out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import jax
from flax import nnx


class SharedLayers:
    """Calls modules, those that are alike through one `jax.jit`, during one trace of a model."""

    def __init__(self):
        self._functions: dict[Hashable, Callable] = {}

    def __call__(self, kind: Hashable, layer: nnx.Module, *arguments):
        """`layer(*arguments)`.

        Args:
          kind: what the module was built from, names aside. Modules of one kind differ at most in
            which variables they have (adapter slots), and in these.
        """
        graph, state = nnx.split(layer)
        variables, tree = jax.tree.flatten(state)
        key = kind, tuple(path for path, _ in nnx.to_flat_state(state))
        if key not in self._functions:

            def call(variables, *arguments):
                return nnx.merge(graph, jax.tree.unflatten(tree, variables))(*arguments)

            self._functions[key] = jax.jit(call)
        return self._functions[key](variables, *arguments)
