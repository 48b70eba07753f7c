"""Kernels for GPUs, forward and back.

Forward, a program has some query heads of one token, or all its key and value heads: of one token
alone, one program would take longer for all of them than many for a few each. Back, it has all.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layered import Layered, is_layered, layer_operands, number_of

MOST_HEADS = 8  # query heads of a program


def rotate_and_cache(heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, eps):
    tokens, count, width = heads.shape
    q_heads = count - 2 * k_pages.shape[2]
    inputs = _Inputs.operands(heads, q_weight, k_weight, cos, sin, view)
    part = min(MOST_HEADS, q_heads & -q_heads)  # blocks are powers of two
    call = pl.pallas_call(
        functools.partial(_kernel, q_weight is not None, part, eps),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, q_heads, width), heads.dtype),
            jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
            jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
        ),
        grid=(tokens, q_heads // part + 1),
        input_output_aliases={len(inputs): 1, len(inputs) + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=1),
        interpret=jax.default_backend() == "cpu",
        name="rotate_and_cache",
    )
    return call(*inputs, k_pages, v_pages)


def head_gradients(heads, q_weight, k_weight, cos, sin, dq, dk_pages, dv_pages, view, eps):
    inputs = _Inputs.operands(heads, q_weight, k_weight, cos, sin, view)
    call = pl.pallas_call(
        functools.partial(_gradient_kernel, q_weight is not None, eps),
        out_shape=jax.ShapeDtypeStruct(heads.shape, heads.dtype),
        grid=(heads.shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=jax.default_backend() == "cpu",
        name="head_gradients",
    )
    return call(*inputs, dq, dk_pages, dv_pages)


def stacked_weights(heads, *weights):
    """Each as `Layered`, in the heads' dtype: a weight alone is that of a layer of one."""
    weights = [its.astype(heads.dtype) for its in weights]
    if all(map(is_layered, weights)):
        return weights
    return [Layered(jnp.asarray(its)[None], 0) for its in weights]


class _Inputs(NamedTuple):
    """References that both kernels begin with, see `rotate_and_cache`.

    The layer and the weights, which come last, are None where nothing is normed.
    """

    heads: jax.Array
    cos: jax.Array
    sin: jax.Array
    request: jax.Array
    positions: jax.Array
    page_tables: jax.Array
    layer: jax.Array | None = None
    offset: jax.Array | None = None
    q_weight: jax.Array | None = None
    k_weight: jax.Array | None = None

    @staticmethod
    def operands(heads, q_weight, k_weight, cos, sin, view):
        """What a kernel is given for them."""
        operands = heads, cos, sin, *view
        if q_weight is None:
            return operands
        weights = stacked_weights(heads, q_weight, k_weight)
        return *operands, *layer_operands(*weights), *(its.stack for its in weights)

    @classmethod
    def of(cls, refs, normed: bool):
        """These, and the references after them."""
        count = len(cls._fields) - (0 if normed else len(cls._field_defaults))
        return cls(*refs[:count]), refs[count:]


class _Token:
    """What both kernels need to know of a program's token.

    Attributes:
      halves: of a head's features, which are rotated with each other.
    """

    def __init__(self, inputs: _Inputs):
        self.inputs = inputs
        self.number = token = pl.program_id(0)
        normed = inputs.layer is not None
        self.layer = number_of((inputs.layer, inputs.offset)) if normed else None
        width = inputs.heads.shape[2]
        self.halves = [pl.ds(start, width // 2) for start in (0, width // 2)]
        self.cosines, self.sines = inputs.cos[token][None], inputs.sin[token][None]

    def place_in(self, pages):
        """Its page and its place there, and whether it is cached; if not, the place is any."""
        view = self.inputs.request, self.inputs.positions, self.inputs.page_tables
        return place_of_token(*view, self.number, pages.shape[1])

    def load(self, ref, block, place=None):
        """Both halves of some heads."""
        place = (self.number,) if place is None else place
        return [ref[*place, block, half] for half in self.halves]

    def store(self, ref, block, values, place=None, mask=None):
        place = (self.number,) if place is None else place
        for half, its in zip(self.halves, values, strict=True):
            plgpu.store(ref.at[*place, block, half], its.astype(ref.dtype), mask=mask)

    def halves_of(self, weight):
        """Those of a norm's weight. To be read before heads: it comes from farther away."""
        return [weight[self.layer, columns][None] for columns in self.halves]

    def normed(self, ref, block, eps):
        """Both halves of heads divided by their root mean square, in float32, and that inverse."""
        wide = [half.astype(jnp.float32) for half in self.load(ref, block)]
        inverse = lax.rsqrt(_mean(wide, wide) + eps)
        return [half * inverse for half in wide], inverse


def place_of_token(request, positions, page_tables, number, page_size: int):
    """A token's page and its place there, and whether it is cached; if not, the place is any."""
    of, position = request[number], positions[number]
    column = position // page_size
    valid = (of >= 0) & (column < page_tables.shape[1])
    # Where there is none, some page.
    page = page_tables[jnp.maximum(of, 0), jnp.minimum(column, page_tables.shape[1] - 1)]
    return (jnp.where(valid, page, 0), position % page_size), valid


def _weighted(halves, weights):
    """Halves of heads rounded to the weight's dtype, times it, in float32."""
    return [
        (half.astype(weight.dtype) * weight).astype(jnp.float32)
        for half, weight in zip(halves, weights, strict=True)
    ]


def _mean(left, right):
    """The mean over each head's features of the product of two."""
    sums = (
        (one * other).sum(axis=1, keepdims=True) for one, other in zip(left, right, strict=True)
    )
    return sum(sums) / (2 * left[0].shape[1])


def _blocks(first, count):
    """Slices of some heads: blocks are powers of two."""
    size = count & -count
    return [pl.ds(first + start, size) for start in range(0, count, size)]


def _kv_blocks(q_heads, kv_heads):
    """Of key/value heads, and where in a token's heads their keys and their values are."""
    for block in _blocks(0, kv_heads):
        starts = (block.start + first for first in (q_heads, q_heads + kv_heads))
        yield block, *(pl.ds(start, block.size) for start in starts)


def _kernel(normed, part, eps, *refs):
    inputs, (_, _, q, k_pages, v_pages) = _Inputs.of(refs, normed)
    heads, number, q_heads = inputs.heads, pl.program_id(1), q.shape[1]
    token = _Token(inputs)

    def weighted(block, weight):
        if weight is None:
            return [half.astype(jnp.float32) for half in token.load(heads, block)]
        weights = token.halves_of(weight)
        return _weighted(token.normed(heads, block, eps)[0], weights)

    def rotated(block, weight):
        one, other = weighted(block, weight)
        return (
            one * token.cosines - other * token.sines,
            other * token.cosines + one * token.sines,
        )

    @pl.when(number * part < q_heads)
    def _queries():
        block = pl.ds(number * part, part)
        token.store(q, block, rotated(block, inputs.q_weight))

    @pl.when(number * part == q_heads)
    def _keys_and_values():
        place, valid = token.place_in(k_pages)
        mask = jnp.full((1, 1), valid)
        for block, keys, values in _kv_blocks(q_heads, k_pages.shape[2]):
            token.store(k_pages, block, rotated(keys, inputs.k_weight), place, mask)
            token.store(v_pages, block, token.load(heads, values), place, mask)


def _gradient_kernel(normed, eps, *refs):
    inputs, (dq, dk_pages, dv_pages, dheads) = _Inputs.of(refs, normed)
    token, heads, q_heads = _Token(inputs), inputs.heads, dq.shape[1]
    place, valid = token.place_in(dk_pages)

    def unrotated(block, weight, gradients):
        """The gradient of heads from that of what they became, rounded where a step's result is."""
        one, other = (half.astype(jnp.float32) for half in gradients)
        back = (
            one * token.cosines + other * token.sines,
            other * token.cosines - one * token.sines,
        )
        if weight is None:
            return back
        dnormed = _weighted(back, token.halves_of(weight))
        normed, inverse = token.normed(heads, block, eps)
        along = _mean(dnormed, normed)
        return [inverse * (its - half * along) for its, half in zip(dnormed, normed, strict=True)]

    for block in _blocks(0, q_heads):
        token.store(dheads, block, unrotated(block, inputs.q_weight, token.load(dq, block)))
    for block, keys, values in _kv_blocks(q_heads, dk_pages.shape[2]):
        dk, dv = (
            [jnp.where(valid, half, 0) for half in token.load(pages, block, place)]
            for pages in (dk_pages, dv_pages)
        )
        token.store(dheads, keys, unrotated(keys, inputs.k_weight, dk))
        token.store(dheads, values, dv)
