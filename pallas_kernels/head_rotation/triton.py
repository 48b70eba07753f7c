"""Kernels for GPUs, forward and back: a program has all heads of one token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def rotate_and_cache(heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, eps):
    tokens, count, width = heads.shape
    q_heads = count - 2 * k_pages.shape[2]
    weights = (weight.astype(heads.dtype) for weight in (q_weight, k_weight))
    call = pl.pallas_call(
        functools.partial(_kernel, q_heads, eps),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, q_heads, width), heads.dtype),
            jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
            jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
        ),
        grid=(tokens,),
        input_output_aliases={8: 1, 9: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=jax.default_backend() == "cpu",
        name="rotate_and_cache",
    )
    return call(heads, *weights, cos, sin, *view, k_pages, v_pages)


def head_gradients(heads, q_weight, k_weight, cos, sin, dq, dk_pages, dv_pages, view, eps):
    weights = (weight.astype(heads.dtype) for weight in (q_weight, k_weight))
    call = pl.pallas_call(
        functools.partial(_gradient_kernel, eps),
        out_shape=jax.ShapeDtypeStruct(heads.shape, heads.dtype),
        grid=(heads.shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=jax.default_backend() == "cpu",
        name="head_gradients",
    )
    return call(heads, *weights, cos, sin, *view, dq, dk_pages, dv_pages)


class _Token:
    """What both kernels need to know of a program's token.

    Attributes:
      halves: of a head's features, which are rotated with each other.
      place: its page and its place there; any where `valid` says that it is not cached.
    """

    def __init__(self, cos, sin, request, positions, page_tables, pages):
        self.number = token = pl.program_id(0)
        page_size, _, width = pages.shape[1:]
        self.halves = [pl.ds(start, width // 2) for start in (0, width // 2)]
        self.cosines, self.sines = cos[token][None], sin[token][None]
        of, position = request[token], positions[token]
        column = position // page_size
        self.valid = (of >= 0) & (column < page_tables.shape[1])
        # Where there is none, some page.
        page = page_tables[jnp.maximum(of, 0), jnp.minimum(column, page_tables.shape[1] - 1)]
        self.place = jnp.where(self.valid, page, 0), position % page_size

    def load(self, ref, block, place=None):
        """Both halves of some heads."""
        place = (self.number,) if place is None else place
        return [ref[*place, block, half] for half in self.halves]

    def store(self, ref, block, values, place=None, mask=None):
        place = (self.number,) if place is None else place
        for half, its in zip(self.halves, values, strict=True):
            plgpu.store(ref.at[*place, block, half], its.astype(ref.dtype), mask=mask)

    def normed(self, ref, block, eps):
        """Both halves of heads divided by their root mean square, in float32, and that inverse."""
        wide = [half.astype(jnp.float32) for half in self.load(ref, block)]
        inverse = lax.rsqrt(_mean(wide, wide) + eps)
        return [half * inverse for half in wide], inverse


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


def _kernel(
    q_heads,
    eps,
    heads,
    q_weight,
    k_weight,
    cos,
    sin,
    request,
    positions,
    page_tables,
    _old_keys,
    _old_values,
    q,
    k_pages,
    v_pages,
):
    token = _Token(cos, sin, request, positions, page_tables, k_pages)
    kv_heads = k_pages.shape[2]

    def rotated(block, weight):
        normed, _ = token.normed(heads, block, eps)
        one, other = (
            (half.astype(heads.dtype) * weight[columns][None]).astype(jnp.float32)
            for half, columns in zip(normed, token.halves, strict=True)
        )
        return (
            one * token.cosines - other * token.sines,
            other * token.cosines + one * token.sines,
        )

    for block in _blocks(0, q_heads):
        token.store(q, block, rotated(block, q_weight))
    mask = jnp.full((1, 1), token.valid)
    for block in _blocks(0, kv_heads):
        keys, values = (
            pl.ds(block.start + first, block.size) for first in (q_heads, q_heads + kv_heads)
        )
        token.store(k_pages, block, rotated(keys, k_weight), token.place, mask)
        token.store(v_pages, block, token.load(heads, values), token.place, mask)


def _gradient_kernel(
    eps,
    heads,
    q_weight,
    k_weight,
    cos,
    sin,
    request,
    positions,
    page_tables,
    dq,
    dk_pages,
    dv_pages,
    dheads,
):
    token = _Token(cos, sin, request, positions, page_tables, dk_pages)
    q_heads, kv_heads = dq.shape[1], dk_pages.shape[2]

    def unrotated(block, weight, gradients):
        """The gradient of heads from that of what they became, rounded where a step's result is."""
        one, other = (half.astype(jnp.float32) for half in gradients)
        back = (
            one * token.cosines + other * token.sines,
            other * token.cosines - one * token.sines,
        )
        dnormed = [
            (half.astype(heads.dtype) * weight[columns][None]).astype(jnp.float32)
            for half, columns in zip(back, token.halves, strict=True)
        ]
        normed, inverse = token.normed(heads, block, eps)
        along = _mean(dnormed, normed)
        return [inverse * (its - half * along) for its, half in zip(dnormed, normed, strict=True)]

    for block in _blocks(0, q_heads):
        token.store(dheads, block, unrotated(block, q_weight, token.load(dq, block)))
    for block in _blocks(0, kv_heads):
        keys, values = (
            pl.ds(block.start + first, block.size) for first in (q_heads, q_heads + kv_heads)
        )
        dk, dv = (
            [jnp.where(token.valid, half, 0) for half in token.load(pages, block, token.place)]
            for pages in (dk_pages, dv_pages)
        )
        token.store(dheads, keys, unrotated(keys, k_weight, dk))
        token.store(dheads, values, dv)
