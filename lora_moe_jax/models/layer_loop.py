"""Layers whose weights are parts of the same stacks as a loop: one body is traced and compiled.

A kernel gets a whole stack and the layer's number, so that no turn differs from another in more
than that. A GPU's host then launches the same graph for each layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

import jax
from flax import nnx

from lora_moe_jax.models.hoisting import hoisted_loop
from pallas_kernels.implementation import platform_implementation
from pallas_kernels.layered import Layered, is_layered

WRITTEN_OUT = 4  # layers of a turn, at most
# Where a turn begins and ends takes a GPU 7 us, and a layer of few tokens 50. With all layers in
# one turn nothing is gained any more, and there is no loop: their graph is one with the step's
# inputs, which move, and the host asks every kernel of it again (JAX 0.11.2: 0.7 to 1.9 ms).
FEW, WRITTEN_OUT_OF_FEW = 8, 24


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


def loop(
    layers: Sequence[nnx.Module],
    run: range,
    kinds: Sequence[Hashable],
    call: Callable,
    carry,
    tokens: int,
):
    """call(number, layer, carry) -> carry, result of each layer of a run of `loops`.

    Args:
      kinds: what each of the run's layers was built from, names aside. Of those that come again and
        again in one order (with a window, without one, with one, …) one turn each is traced.
      tokens: how many the carry has.

    Returns:
      The carry, and the results with an axis for the layers in front.
    """

    def turn_like(layer: nnx.Module) -> Callable:
        graph, state = nnx.split(layer)
        leaves, tree = jax.tree.flatten(state, is_leaf=is_layered)

        def turn(number, place, carry):
            parts = [Layered(leaf.stack, number, begin + place) for leaf in leaves]
            layer = nnx.merge(graph, jax.tree.unflatten(tree, parts))
            return call(run.start + number + place, layer, carry)

        return turn

    first = jax.tree.leaves(nnx.state(layers[run.start]), is_leaf=is_layered)
    begin = first[0].number
    turns = [turn_like(layers[number]) for number in run[: _period(kinds)]]
    return hoisted_loop(len(run), turns, carry, written_out=_written_out(len(run), tokens))


def _written_out(layers: int, tokens: int) -> int:
    """Of so many layers, how many a turn has at most."""
    if tokens > FEW or platform_implementation() != "mosaic_gpu":
        return WRITTEN_OUT
    return min(WRITTEN_OUT_OF_FEW, -(-layers // 2))


def _period(kinds: Sequence[Hashable]) -> int:
    """After how many the kinds come again."""
    shifts = range(1, len(kinds))
    return next((n for n in shifts if kinds[n:] == kinds[:-n]), len(kinds))
