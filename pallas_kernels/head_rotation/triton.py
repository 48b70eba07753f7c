"""A kernel for GPUs: a program has all heads of one token."""

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
    token = pl.program_id(0)
    page_size, kv_heads, width = k_pages.shape[1:]
    halves = [pl.ds(start, width // 2) for start in (0, width // 2)]
    angles = cos[token][None], sin[token][None]

    def blocks(first, count):
        """Slices of some heads: blocks are powers of two."""
        size = count & -count
        return [pl.ds(first + start, size) for start in range(0, count, size)]

    def load(block):
        """Both halves of each head."""
        return [heads[token, block, half] for half in halves]

    def store(ref, place, block, values, mask=None):
        for half, its in zip(halves, values, strict=True):
            plgpu.store(ref.at[*place, block, half], its.astype(ref.dtype), mask=mask)

    def rotated(block, weight):
        wide = [half.astype(jnp.float32) for half in load(block)]
        squares = sum((half * half).sum(axis=1, keepdims=True) for half in wide)
        scale = lax.rsqrt(squares / width + eps)
        normed = [
            (half * scale).astype(heads.dtype) * weight[columns][None]
            for half, columns in zip(wide, halves, strict=True)
        ]
        one, other = (half.astype(jnp.float32) for half in normed)
        cosines, sines = angles
        return one * cosines - other * sines, other * cosines + one * sines

    for block in blocks(0, q_heads):
        store(q, (token,), block, rotated(block, q_weight))
    of, position = request[token], positions[token]
    column = position // page_size
    valid = (of >= 0) & (column < page_tables.shape[1])
    # Where there is none, some page, of which nothing is written.
    page = page_tables[jnp.maximum(of, 0), jnp.minimum(column, page_tables.shape[1] - 1)]
    place = jnp.where(valid, page, 0), position % page_size
    mask = jnp.full((1, 1), valid)
    for block in blocks(0, kv_heads):
        keys, values = (
            pl.ds(block.start + first, block.size) for first in (q_heads, q_heads + kv_heads)
        )
        store(k_pages, place, block, rotated(keys, k_weight), mask)
        store(v_pages, place, block, load(values), mask)
