"""Layers whose weights are parts of the same stacks as a loop: one body is traced and compiled.

A kernel gets a whole stack and the layer's number, so that no turn differs from another in more
than that. A GPU's host then launches the same graph for each layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
from flax import nnx

from lora_moe_jax.models.hoisting import hoisted_loop
from pallas_kernels.layered import Layered, is_layered


def loops(layers: Sequence[nnx.Module], of: type[nnx.Variable] = nnx.Variable) -> list[range]:
    """The layers, in runs of such that have the next part of each stack, a part of one number in
    all of them; others are alone.

    Args:
      of: which variables count.
    """

    def key(number: int):
        leaves = jax.tree.leaves(nnx.state(layers[number], of), is_leaf=is_layered)
        parts = {leaf.number if is_layered(leaf) else None for leaf in leaves}
        if len(parts) > 1 or not isinstance(*parts, int):
            return number
        (part,) = parts
        return number - part, [id(leaf.stack) for leaf in leaves]

    runs = (list(run) for _, run in itertools.groupby(range(len(layers)), key))
    return [range(run[0], run[-1] + 1) for run in runs]


def loop(layers: Sequence[nnx.Module], run: range, call: Callable, carry):
    """call(number, layer, carry) -> carry, result of each layer of a run of `loops`.

    Returns:
      The carry, and the results with an axis for the layers in front.
    """
    graph, state = nnx.split(layers[run.start])
    first, tree = jax.tree.flatten(state, is_leaf=is_layered)
    begin = first[0].number

    def turn(number, place, carry):
        parts = [Layered(leaf.stack, number, begin + place) for leaf in first]
        layer = nnx.merge(graph, jax.tree.unflatten(tree, parts))
        return call(run.start + number + place, layer, carry)

    return hoisted_loop(len(run), turn, carry)
