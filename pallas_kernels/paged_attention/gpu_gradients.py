"""The gradient of causal attention over whole sequences, on Hopper GPUs.

Sequences are laid out in tiles that begin at multiples of 128 of their positions, with zeros after
their ends: other sequences' numbers never get near a product, and bits do not depend on the batch.
Then two kernels: queries, with each row's log-sum-exp, and from that keys and values.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from pallas_kernels.paged_attention import backward
from pallas_kernels.paged_attention.gpu_gradient_units import (
    CONSUMERS,
    ROWS,
    TILE,
    GradientSizes,
    tile_table,
)
from pallas_kernels.paged_attention.gpu_gradients_kv import key_gradients
from pallas_kernels.paged_attention.gpu_gradients_q import query_gradients

WIDTHS = (64, 128, 192)  # of queries and keys
V_WIDTHS = (64, 128)


def attention_gradients(
    q, k, v, out, dout, view, scale, sliding_window, sinks, *, interpreted=False
):
    """dq, dk, dv of a batch of whole sequences: see `backward.attention_gradients`.

    In q's dtype where the kernels serve; what they cannot, plain JAX does.
    """
    arguments = q, k, v, out, dout, view, scale, sliding_window, sinks
    if not _serves(q, k, v, scale):
        return backward.attention_gradients(*arguments)
    tiles = backward.cut(view, TILE)
    dout = dout.astype(q.dtype)
    minus_delta = -jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def laid_out(x):
        return backward.spread(x, tiles).reshape(-1, *x.shape[1:])

    q, k, v, dout, minus_delta = map(laid_out, (q, k, v, dout, minus_delta))
    minus_delta = minus_delta.T
    sizes = GradientSizes(
        places=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        width=q.shape[2],
        v_width=v.shape[2],
        window=sliding_window,
        sinks=sinks is not None,
        scale=scale,
        interpreted=interpreted,
    )
    blocks = -(-tiles.length // ROWS)
    table = tile_table(tiles.number, blocks, work=tiles.number)
    sinks = () if sinks is None else (sinks.astype(jnp.float32) * math.log2(math.e),)
    dq, minus_lse = query_gradients(sizes, table, q, k, v, dout, minus_delta, *sinks)
    table = tile_table(tiles.number, blocks, work=blocks - CONSUMERS * tiles.number)
    parts = key_gradients(sizes, table, q, k, v, dout, minus_lse, minus_delta)
    dk, dv = (its.sum(axis=0).astype(q.dtype) for its in parts)
    shape = tiles.token.shape
    return tuple(backward.gather(x.reshape(*shape, *x.shape[1:]), tiles) for x in (dq, dk, dv))


def _serves(q, k, v, scale) -> bool:
    return (
        all(x.dtype == jnp.bfloat16 for x in (q, k, v))
        and q.shape[2] in WIDTHS
        and v.shape[2] in V_WIDTHS
        and q.shape[0] > 0
        and scale > 0
    )
