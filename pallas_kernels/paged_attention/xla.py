"""Paged attention in plain JAX: tiles of tokens against blocks of positions, always one shape.

Every token gathers its own request's block, so a tile may mix requests. A block that lies wholly
past a token's position changes nothing in that token's running softmax, bit for bit: the maximum
stays, the correction factor is exp(0) = 1, and what is added is zero. So the number of blocks may
follow the longest token of the tile.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

TOKEN_TILE = 8
KV_BLOCK = 64


def write_pages(pages, values, view):
    flat = pages.reshape(-1, *pages.shape[2:])
    slot = _slot_of_token(pages, view)
    return flat.at[slot].set(values.astype(pages.dtype), mode="drop").reshape(pages.shape)


def read_pages(pages, view):
    """What `write_pages` has written of each token; zeros where it writes nothing."""
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[_slot_of_token(pages, view)].get(mode="fill", fill_value=0)


def _slot_of_token(pages, view):
    """Each token's row of the flattened cache; past the end for what is not cached."""
    page_size = pages.shape[1]
    slot = _cache_index(view.page_tables, view.request, view.positions, page_size)
    requests, pages_of_request = view.page_tables.shape
    in_table = (view.request >= 0) & (view.request < requests)
    in_table &= (view.positions >= 0) & (view.positions < pages_of_request * page_size)
    return jnp.where(in_table & (slot >= 0), slot, pages.shape[0] * page_size)


def paged_attention(q, k_pages, v_pages, view, scale, sliding_window, sinks):
    tokens, heads, width = q.shape
    kv_heads = k_pages.shape[2]
    by_head = kv_heads, heads // kv_heads
    q = q.reshape(tokens, *by_head, width)
    sinks = None if sinks is None else sinks.reshape(by_head)

    def scores(q_tile, where):
        return _batched("tkgd,tpkd->tkgp", q_tile[0], _take(k_pages, where))

    def values(weights, where, visible):
        v = _take(v_pages, where)
        v = jnp.where(visible[:, :, None, None], v, 0)
        return _batched("tkgp,tpkd->tkgd", weights, v)

    functions = scores, values, scale, sliding_window, sinks
    out = _attend((q,), view, k_pages, v_pages.shape[-1], *functions)
    return out.reshape(tokens, heads, v_pages.shape[-1]).astype(q.dtype)


def paged_latent_attention(q_latent, q_rope, latent_pages, rope_pages, view, scale):
    def scores(q_tile, where):
        latent, rope = _take(latent_pages, where), _take(rope_pages, where)
        return _batched("thc,tpc->thp", q_tile[0], latent) + _batched(
            "the,tpe->thp", q_tile[1], rope
        )

    def values(weights, where, visible):
        latent = jnp.where(visible[:, :, None], _take(latent_pages, where), 0)
        return _batched("thp,tpc->thc", weights, latent)

    width = q_latent.shape[-1]
    out = _attend((q_latent, q_rope), view, latent_pages, width, scores, values, scale, None, None)
    return out.astype(q_latent.dtype)


def _attend(queries, view, pages, width, scores, values, scale, sliding_window, sinks):
    """Runs the tiles; `scores` and `values` know the form of the cache.

    A sink is a score without a value, so sums begin with it.
    """
    tokens, *head_shape, _ = queries[0].shape
    pad = -tokens % TOKEN_TILE
    queries = tuple(_pad(q, pad) for q in queries)
    request = _pad(view.request, pad, -1)
    positions = _pad(view.positions, pad)
    page_size = pages.shape[1]
    dtype = jnp.promote_types(jnp.float32, queries[0].dtype)

    def tile(i, out):
        q, request_t, position_t = _slice_tile(i, queries, request, positions)
        last = jnp.where(request_t >= 0, position_t, -1)

        def block(j, carry):
            maximum, total, acc = carry
            position = j * KV_BLOCK + jnp.arange(KV_BLOCK)
            visible = position <= last[:, None]
            if sliding_window is not None:
                visible &= position > last[:, None] - sliding_window
            where = _cache_index(view.page_tables, request_t[:, None], position, page_size)
            where = jnp.where(visible, where, 0)
            mask = visible.reshape(TOKEN_TILE, *[1] * len(head_shape), KV_BLOCK)
            s = jnp.where(mask, scores(q, where) * scale, -jnp.inf)
            new_maximum = jnp.maximum(maximum, s.max(-1))
            # Before a token's first visible block the maximum is -inf; keep the arithmetic finite.
            base = jnp.where(jnp.isfinite(new_maximum), new_maximum, 0)
            weights = jnp.exp(s - base[..., None])
            keep = jnp.exp(maximum - base)
            total = total * keep + weights.sum(-1)
            acc = acc * keep[..., None] + values(weights, where, visible)
            return new_maximum, total, acc

        carry = (
            jnp.full((TOKEN_TILE, *head_shape), -jnp.inf if sinks is None else sinks, dtype),
            jnp.full((TOKEN_TILE, *head_shape), 0 if sinks is None else 1, dtype),
            jnp.zeros((TOKEN_TILE, *head_shape, width), dtype),
        )
        blocks = jnp.max(last) // KV_BLOCK + 1
        _, total, acc = lax.fori_loop(0, blocks, block, carry)
        row = (request_t >= 0).reshape(TOKEN_TILE, *[1] * (len(head_shape) + 1))
        result = jnp.where(row, acc / total[..., None], 0)
        return lax.dynamic_update_slice_in_dim(out, result, i * TOKEN_TILE, axis=0)

    out = jnp.zeros((tokens + pad, *head_shape, width), dtype)
    if not tokens:
        return out
    return lax.fori_loop(0, (tokens + pad) // TOKEN_TILE, tile, out)[:tokens]


def _slice_tile(i, queries, request, positions):
    def cut(array):
        return lax.dynamic_slice_in_dim(array, i * TOKEN_TILE, TOKEN_TILE)

    return tuple(cut(q) for q in queries), cut(request), cut(positions)


def _cache_index(page_tables, request, positions, page_size):
    """Row of the flattened cache that holds a request's position."""
    page = page_tables.at[request, positions // page_size].get(mode="clip")
    return page * page_size + positions % page_size


def _take(pages, where):
    return pages.reshape(-1, *pages.shape[2:]).at[where].get(mode="clip")


def _batched(spec, left, right):
    dtype = jnp.promote_types(jnp.float32, right.dtype)
    return jnp.einsum(
        spec, left.astype(dtype), right.astype(dtype), precision=lax.Precision.HIGHEST
    )


def _pad(array, rows, value=0):
    return jnp.pad(array, ((0, rows), *[(0, 0)] * (array.ndim - 1)), constant_values=value)
