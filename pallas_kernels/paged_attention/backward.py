"""The gradient of causal attention over whole sequences, in plain JAX, in bounded memory.

Tokens are laid out in tiles of `TILE` positions of one sequence. Of every tile at once, the tile
`distance` before it is attended to, for growing distances: so what is stored at a time is
T x H x TILE scores, and each sum runs in the order of distances. A token's bits depend on its own
sequence alone, wherever in the batch that lies: tiles begin at multiples of `TILE` in the sequence,
and what other sequences give is selected away.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.apart import apart
from pallas_kernels.row_reduce.api import row_sum

TILE = 64


class Tiles(NamedTuple):
    """Where tokens go.

    Attributes:
      token: int32 [tiles, height], the token of each place; T where there is none.
      place: int32 [T], the flat place of each token; past the last for padding tokens.
      number: int32 [tiles], which tile of its sequence each is; -1 for unused ones.
      length: int32 [tiles], that of the sequence; 0 for unused ones.
    """

    token: jax.Array
    place: jax.Array
    number: jax.Array
    length: jax.Array


def attention_gradients(q, k, v, out, dout, view, scale, sliding_window, sinks):
    """dq, dk, dv of a batch of whole sequences, float32 (or float64).

    Args:
      q, out, dout: [T, H, D], [T, H, V], [T, H, V]. k, v: [T, G, D], [T, G, V], of the tokens.
      view: the batch's `PageView`; only requests and positions matter.
      sinks: [H] or None.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    tiles = cut(view, TILE)
    dtype = jnp.promote_types(jnp.float32, q.dtype)

    def grouped(x):
        return x.reshape(x.shape[0], kv_heads, heads // kv_heads, x.shape[-1])

    by_query = q, dout.astype(q.dtype), out
    q, dout, out = (spread(grouped(x), tiles) for x in by_query)
    k, v = spread(k, tiles), spread(v, tiles)
    delta = jnp.einsum("nqgid,nqgid->ngiq", dout.astype(dtype), out.astype(dtype))
    distances = jnp.max(tiles.number) + 1
    every = jnp.arange(tiles.number.shape[0])

    def before(x, distance):
        """Of each tile the one `distance` before it."""
        return x[jnp.maximum(every - distance, 0)]

    def scores(distance):
        """[tiles, G, H / G, query, key], and which of them count."""
        ahead = distance * TILE + jnp.arange(TILE)[:, None] - jnp.arange(TILE)
        near = ahead >= 0 if sliding_window is None else (ahead >= 0) & (ahead < sliding_window)
        there = tiles.number >= distance
        visible = near & there[:, None, None, None, None]
        s = _product("nqgid,nkgd->ngiqk", q, before(k, distance), dtype) * scale
        return jnp.where(visible, s, -jnp.inf), visible, there

    def normaliser(distance, carry):
        maximum, total = carry
        s, *_ = scores(distance)
        # The first distance is a token's own tile, and the token sees itself: finite from then on.
        higher = jnp.maximum(maximum, s.max(-1))
        kept = apart(total * jnp.exp(apart(maximum - higher)))
        return higher, kept + _sum_of_keys(jnp.exp(apart(s - higher[..., None])))

    lowest, none = jnp.full(delta.shape, jnp.finfo(dtype).min, dtype), jnp.zeros_like(delta)
    if sinks is not None:
        lowest = jnp.broadcast_to(sinks.astype(dtype).reshape(*delta.shape[1:3], 1), delta.shape)
        none = jnp.ones_like(delta)
    maximum, total = lax.fori_loop(0, distances, normaliser, (lowest, none))
    log_total = maximum + jnp.log(total)

    def gradients(distance, carry):
        dq, dk, dv = carry
        s, visible, there = scores(distance)
        weights = jnp.where(visible, jnp.exp(apart(s - log_total[..., None])), 0)
        dweights = _product("nqgid,nkgd->ngiqk", dout, before(v, distance), dtype)
        ds = jnp.where(visible, weights * (dweights - delta[..., None]) * scale, 0)
        weights, ds = weights.astype(q.dtype), ds.astype(q.dtype)
        dq += _kept(there, _product("ngiqk,nkgd->nqgid", ds, before(k, distance), dtype))

        def to_keys(product):
            """A tile's keys get what the tile `distance` after it makes of them."""
            source = every + distance
            known = jnp.minimum(source, every[-1])
            return _kept((source <= every[-1]) & there[known], product[known])

        dk += to_keys(_product("ngiqk,nqgid->nkgd", ds, q, dtype))
        dv += to_keys(_product("ngiqk,nqgid->nkgd", weights, dout, dtype))
        return dq, dk, dv

    zeros = tuple(jnp.zeros(x.shape, dtype) for x in (q, k, v))
    dq, dk, dv = lax.fori_loop(0, distances, gradients, zeros)
    dq = gather(dq, tiles)
    return dq.reshape(dq.shape[0], heads, dq.shape[-1]), gather(dk, tiles), gather(dv, tiles)


def cut(view, height: int) -> Tiles:
    """Tiles of `height` positions of one sequence; any order of tokens is allowed."""
    tokens, requests = view.request.shape[0], view.page_tables.shape[0]
    count = tokens // height + requests
    real = view.request >= 0
    request = jnp.where(real, view.request, requests)
    lengths = jnp.zeros(requests, jnp.int32).at[request].max(view.positions + 1, mode="drop")
    needed = -(-lengths // height)
    first = jnp.cumsum(needed) - needed
    place = first.at[request].get(mode="clip") * height + view.positions
    place = jnp.where(real, place, count * height)
    row = jnp.arange(tokens, dtype=jnp.int32)
    token = jnp.full(count * height, tokens, jnp.int32).at[place].set(row, mode="drop")
    tile = place // height
    number = jnp.full(count, -1, jnp.int32).at[tile].set(view.positions // height, mode="drop")
    length = lengths.at[request].get(mode="clip")
    length = jnp.zeros(count, jnp.int32).at[tile].set(length, mode="drop")
    return Tiles(token.reshape(count, height), place, number, length)


def spread(x, tiles: Tiles):
    """[T, ...] to [tiles, height, ...], zeros where there is no token."""
    return x.at[tiles.token].get(mode="fill", fill_value=0)


def gather(x, tiles: Tiles):
    """[tiles, height, ...] to [T, ...], zeros for padding tokens."""
    return x.reshape(-1, *x.shape[2:]).at[tiles.place].get(mode="fill", fill_value=0)


def _kept(there, x):
    return jnp.where(there.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def _sum_of_keys(x):
    """x summed over its last axis, in an order that does not depend on how many rows there are."""
    return row_sum(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])


def _product(spec, left, right, dtype):
    return jnp.einsum(
        spec, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )
