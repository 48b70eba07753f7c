"""The kernel for GPUs: a program has some heads of one token, or its latent and its rotary key.

Blocks are powers of two; what lies past the columns is masked.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.head_rotation.triton import MOST_HEADS, place_of_token
from pallas_kernels.layered import LAYER_OPERANDS, as_stack, is_layered, layer_operands, number_of


def rotate_and_cache_latents(sizes, q, kv, weight, cos, sin, latent_pages, rope_pages, view):
    tokens, s = q.shape[0], sizes
    part = min(MOST_HEADS, s.heads & -s.heads)  # blocks are powers of two
    inputs = *view, q, kv, cos, sin, *layer_operands(weight), as_stack(weight)
    q_nope, *rest = pl.pallas_call(
        functools.partial(_kernel, s, part, LAYER_OPERANDS * is_layered(weight)),
        out_shape=(
            # As its product by heads takes it.
            jax.ShapeDtypeStruct((s.heads, tokens, s.nope), q.dtype),
            jax.ShapeDtypeStruct((tokens, s.heads, s.rope), q.dtype),
            jax.ShapeDtypeStruct(latent_pages.shape, latent_pages.dtype),
            jax.ShapeDtypeStruct(rope_pages.shape, rope_pages.dtype),
        ),
        grid=(tokens, s.heads // part + 1),
        input_output_aliases={len(inputs): 2, len(inputs) + 1: 3},
        compiler_params=plgpu.CompilerParams(num_warps=2),
        interpret=jax.default_backend() == "cpu",
        name="rotate_and_cache_latents",
    )(*inputs, latent_pages, rope_pages)
    return jnp.swapaxes(q_nope, 0, 1), *rest


def _kernel(sizes, part: int, layers: int, *refs):
    (*view, q, kv, cos, sin), refs = refs[:7], refs[7:]
    layer, (weight, _, _, q_nope, q_rope, latent_pages, rope_pages) = refs[:layers], refs[layers:]
    s, token, number = sizes, pl.program_id(0), pl.program_id(1)
    half, in_half = _columns(s.half)
    cosines, sines = (_load(its, (token, half), in_half) for its in (cos, sin))
    pair = (2 * half, 2 * half + 1) if s.interleaved else (half, s.half + half)
    halves = half, s.half + half  # of a pair, in results

    def rotated(ref, first):
        """Both halves of the pairs that begin with a first column, or with one of each head."""
        both = (_load(ref, (token, first + place), in_half) for place in pair)
        one, other = (its.astype(jnp.float32) for its in both)
        return one * cosines - other * sines, other * cosines + one * sines

    @pl.when(number * part < s.heads)
    def _queries():
        head = number * part + lax.iota(jnp.int32, part)[:, None]
        first = s.q_first + head * s.head
        column, inside = _columns(s.nope)
        values = _load(q, (token, first + column), inside)
        _store(q_nope, (head, token, column), values, inside)
        for place, its in zip(halves, rotated(q, first + s.nope), strict=True):
            _store(q_rope, (token, head, place), its, in_half)

    @pl.when(number * part == s.heads)
    def _cache():
        place, valid = place_of_token(*view, token, latent_pages.shape[1])
        column, inside = _columns(s.latent)
        weights = _load(weight, (number_of(layer), column), inside)
        wide = _load(kv, (token, s.kv_first + column), inside).astype(jnp.float32)
        inverse = lax.rsqrt((wide * wide).sum() / s.latent + s.eps)
        normed = (wide * inverse).astype(kv.dtype) * weights
        _store(latent_pages, (*place, column), normed, inside & valid)
        for at, its in zip(halves, rotated(kv, s.kv_first + s.latent), strict=True):
            _store(rope_pages, (*place, at), its, in_half & valid)


def _columns(count: int):
    """[1, a power of two]: the numbers of so many columns, and which are no more than that."""
    column = lax.iota(jnp.int32, pl.next_power_of_2(count))[None]
    return column, column < count


def _load(ref, place, mask):
    """What is at a place that ends with columns; zeros where the mask says no."""
    mask = jnp.broadcast_to(mask, place[-1].shape)
    return plgpu.load(ref.at[place], mask=mask, other=0)


def _store(ref, place, values, mask):
    mask = jnp.broadcast_to(mask, values.shape)
    plgpu.store(ref.at[place], values.astype(ref.dtype), mask=mask)
