"""A model in pieces, the embedding, each layer, and the head, each with its gradient.

Each piece is a function of its own, one for all layers that are alike: so a model compiles as fast
as its kinds of layers, and a layer's gradients are done with before the next one's begin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from lora_moe_jax.adapters.bank import Bank
from lora_moe_jax.layers.adapter_slots import AdapterSlots, LoraParam
from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.layers.logprobs import token_logprobs
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.serving.model_arrays import SlotField
from lora_moe_jax.training.pack_slots import PackSlots
from lora_moe_jax.training.packing import PackedBatch, PackSizes
from pallas_kernels import PageView
from pallas_kernels.kept import KEPT

FactorGradients = dict[str, dict[str, jax.Array]]  # by projection and factor, of all copies
SlotGradients = dict[int, FactorGradients]  # by rank class
Kept = list[jax.Array | None]  # what the pass back takes from the pass forward


class Arrays(NamedTuple):
    """What a piece's module is made of.

    Attributes:
      factors: of the adapters' slots, those whose gradients are wanted.
      others: their scalings, and slots of other pieces.
    """

    factors: list[jax.Array]
    others: list[jax.Array]
    base: list[jax.Array]


Rebuild = Callable[[Arrays], nnx.Module]


class Role(NamedTuple):
    """What a piece computes.

    Attributes:
      forward: (rebuild, arrays, x, batch, sizes) -> y, kept.
      backward: (rebuild, arrays, kept, batch, sizes, dy) -> gradients of the factors, dx.
      choices: (rebuild, arrays, x, batch, sizes) -> int32 [T, choices], the experts that `forward`
        sends tokens to; None without a router.
    """

    forward: Callable
    backward: Callable
    choices: Callable | None = None


class Piece:
    """A part of the model, on the engine's arrays as they are at each call.

    Args:
      kind: pieces of one kind that have the same slots are the same function.
      frozen: an attribute whose slots belong to another piece.
    """

    def __init__(self, kind: Hashable, module: nnx.Module, role: Role, frozen: str | None = None):
        def is_factor(path, variable) -> bool:
            slots = isinstance(variable, LoraParam) and path[0] != frozen
            return slots and path[-1] != "scaling"

        nodes = {p: n for p, n in nnx.iter_graph(module) if isinstance(n, AdapterSlots)}

        def names(state) -> list[SlotField]:
            paths = [path for path, _ in nnx.to_flat_state(state)]
            return [SlotField.of(nodes[path[:-1]], path[-1]) for path in paths]

        graph, *states = nnx.split(module, is_factor, LoraParam, ...)
        self.factors, self._others = map(names, states[:2])
        # A layer's number in its stacks, if it is in some, is an argument like its arrays.
        states[2] = jax.tree.map(jnp.asarray, states[2])
        self._base = jax.tree.leaves(states[2])
        trees = [jax.tree.structure(state) for state in states]
        paths = [tuple(path for path, _ in nnx.to_flat_state(state)) for state in states]
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(states))
        self.key = kind, *paths, shapes
        self.functions = _jitted_role(role, graph, trees)

    def alike(self, other: Piece) -> None:
        """Shares the functions of a piece with the same key."""
        self.functions = other.functions

    def arrays(self, bank: Bank, slots: PackSlots) -> Arrays:
        """What the functions take, as it is now, with copies of a pack's slots."""
        stacks, indices, ranks = [], [], []
        for field in self.factors + self._others:
            its = bank.classes[field.rank]
            stack, index = its.places[field.projection]
            stacks.append(getattr(its.stacks[stack], field.name))
            indices.append(index)
            ranks.append(field.rank)
        own = _at(tuple(ranks), stacks, np.int32(indices), slots.chosen)
        return Arrays(own[: len(self.factors)], own[len(self.factors) :], self._base)

    def slot_gradients(self, values: list[jax.Array]) -> SlotGradients:
        """The gradients of the factors, by whose they are."""
        gradients: SlotGradients = {}
        for (rank, projection, factor), value in zip(self.factors, values, strict=True):
            gradients.setdefault(rank, {}).setdefault(projection, {})[factor] = value
        return gradients


@functools.partial(jax.jit, static_argnums=0)
def _at(
    ranks: tuple[int, ...],
    stacks: list[jax.Array],
    indices: jax.Array,
    chosen: Mapping[int, jax.Array],
) -> list[jax.Array]:
    """Slots of an array of each stack: copies, there for as long as their layer's turn takes."""
    return [
        stack.at[i, chosen[rank]].get(mode="promise_in_bounds")
        for stack, i, rank in zip(stacks, indices, ranks, strict=True)
    ]


def pieces(model: Decoder) -> list[Piece]:
    """The model's pieces in the order of the forward pass; only its base arrays are kept."""
    config = model.config
    found = [Piece("embedding", model.embed_tokens, _role(_embed))]
    for i, layer in enumerate(model.layers):
        shapes = layer.self_attn.cache_shapes(config)
        found.append(Piece(config.kind(i), layer, _layer_role(shapes, config.is_sparse(i))))
    ending = Ending(model.norm, model.lm_head, model.embed_tokens)
    found.append(Piece("ending", ending, Role(_ending, _ending_gradients), "embed_tokens"))
    first: dict[Hashable, Piece] = {}
    for piece in found:
        piece.alike(first.setdefault(piece.key, piece))
    return found


class Ending(nnx.Module):
    """What comes after the layers."""

    def __init__(self, norm: nnx.Module, lm_head: nnx.Module, embed_tokens: nnx.Module):
        self.norm, self.lm_head, self.embed_tokens = norm, lm_head, embed_tokens


def _jitted_role(role: Role, graph, trees) -> Role:
    """The role with arrays in place of the module."""

    def rebuild(arrays: Arrays) -> nnx.Module:
        states = zip(trees, arrays, strict=True)
        return nnx.merge(graph, *(jax.tree.unflatten(*state) for state in states))

    def forward(arrays, x, batch, sizes):
        return role.forward(rebuild, arrays, x, batch, sizes)

    def backward(arrays, kept, batch, sizes, dy):
        return role.backward(rebuild, arrays, kept, batch, sizes, dy)

    def choices(arrays, x, batch, sizes):
        return role.choices(rebuild, arrays, x, batch, sizes)

    return Role(
        jax.jit(forward, static_argnums=3),
        jax.jit(backward, static_argnums=3),
        role.choices and jax.jit(choices, static_argnums=3),
    )


def _role(run: Callable) -> Role:
    """Of a function (module, x, batch, sizes) -> y that keeps its input and what is `KEPT`."""

    def pull_back(rebuild: Rebuild, arrays: Arrays, x, batch: PackedBatch, sizes: PackSizes):
        def once_more(arrays, x, batch):
            return run(rebuild(arrays), x, batch, sizes)

        again = jax.checkpoint(once_more, policy=KEPT, prevent_cse=False)
        return jax.vjp(again, arrays, x, batch)

    def forward(rebuild, arrays, x, batch, sizes):
        y, pullback = pull_back(rebuild, arrays, x, batch, sizes)
        return y, [x, *pullback.opaque_residuals]

    def backward(rebuild, arrays, kept, batch, sizes, dy):
        x, *kept = kept
        # This forward pass is dead code: all that is taken of it is how to pull back.
        _, pullback = pull_back(rebuild, arrays, x, batch, sizes)
        pullback.opaque_residuals = kept
        of_arrays, dx, _ = pullback(dy)
        return of_arrays.factors, dx

    return Role(forward, backward)


def _embed(embedding: nnx.Module, x: None, batch: PackedBatch, sizes: PackSizes):
    return embedding(batch.tokens, batch.slots)


def _layer_role(shapes, sparse: bool) -> Role:
    def output(layer, x, batch, sizes):
        return _layer(shapes, layer, x, batch, sizes)[0]

    def choices(rebuild, arrays, x, batch, sizes):
        return _layer(shapes, rebuild(arrays), x, batch, sizes)[2]

    return _role(output)._replace(choices=choices if sparse else None)


def _layer(shapes, layer: nnx.Module, x, batch: PackedBatch, sizes: PackSizes):
    """All that the layer gives, with cache pages for this batch's sequences alone."""
    pages = (jnp.zeros((sizes.pages, sizes.page_size, *shape), x.dtype) for shape in shapes)
    view = PageView(batch.request, batch.positions, batch.page_tables)
    return layer(x, batch.slots, LayerCache(*pages, view))


def _ending(rebuild: Rebuild, arrays: Arrays, x, batch: PackedBatch, sizes: PackSizes):
    return _logprobs(rebuild(arrays), x, batch, sizes), [x]


def _logprobs(ending: Ending, x, batch: PackedBatch, sizes: PackSizes):
    """float32 [T], of each token's target; 0 where none is predicted."""
    # As in the engine's step: what follows is compiled as if the hidden states came from outside.
    hidden = lax.optimization_barrier(ending.norm(x))

    def chunk(rows):
        some = _some(batch, hidden, rows)
        return _where_used(rows, sizes, lambda: _score(ending, *some))

    logprobs = lax.map(chunk, batch.head_rows)
    return jnp.zeros(sizes.tokens, jnp.float32).at[batch.head_rows].set(logprobs, mode="drop")


def _ending_gradients(
    rebuild: Rebuild, arrays: Arrays, kept: Kept, batch: PackedBatch, sizes: PackSizes, dy
):
    """`HEAD_ROWS` tokens at a time; the head's factors' are summed over them in float32."""
    (x,), factors, norm = kept, arrays.factors, rebuild(arrays).norm
    hidden, norm_pullback = jax.vjp(norm, x)

    def chunk(total, rows):
        some_hidden, slots, targets = _some(batch, hidden, rows)
        wanted = dy.at[rows].get(mode="fill", fill_value=0)

        def score(factors, some_hidden):
            ending = rebuild(arrays._replace(factors=factors))
            return _score(ending, some_hidden, slots, targets)

        def pull_back():
            return jax.vjp(score, factors, some_hidden)[1](wanted)

        of_factors, dhidden = _where_used(rows, sizes, pull_back)
        total = jax.tree.map(lambda sum_, part: sum_ + part.astype(jnp.float32), total, of_factors)
        return total, dhidden

    zeros = [jnp.zeros(factor.shape, jnp.float32) for factor in factors]
    total, dhidden = lax.scan(chunk, zeros, batch.head_rows)
    dhidden = jnp.zeros_like(hidden).at[batch.head_rows].set(dhidden, mode="drop")
    return total, *norm_pullback(dhidden)


def _score(ending: Ending, hidden, slots, targets):
    return token_logprobs(ending.lm_head(hidden, slots, ending.embed_tokens), targets)


def _some(batch: PackedBatch, hidden, rows) -> tuple[jax.Array, ...]:
    """Hidden states, slots and targets of some tokens; padding has no adapter."""
    fills = (hidden, 0), (batch.slots, -1), (batch.targets, 0)
    return tuple(x.at[rows].get(mode="fill", fill_value=fill) for x, fill in fills)


def _where_used(rows, sizes: PackSizes, compute: Callable):
    """`compute()`, or zeros for a chunk of padding alone."""

    def zeros():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))

    return lax.cond(rows[0] < sizes.tokens, compute, zeros)
