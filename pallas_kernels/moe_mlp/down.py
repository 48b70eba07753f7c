"""The down product of adapters that share B: their rows are added up before B expands them.

    y[t] = Σ_k weights[t, k] · hidden[t, k] · Wᵀ  +  (Σ_k weights[t, k] · u[t, k]) · B[slot of t]

By linearity the same as expanding every row, for a k-th of the work.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_lora_matmul import differentiable
from pallas_kernels.routing_plan.api import combine

RANK_UNIT = 8  # kernels multiply whole units of rank


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combined_down(backend: ModuleType, hidden, down, route, pair, weights, slots):
    """The weighted sums of each token's rows times `down`, with its adapter.

    Args:
      hidden: `[M, I]`, rows of the route. down: `[E, H, I]`.
      pair: `Lora` with a `[S, E or 1, R, I]` and b `[S, 1, R, H]`.
      weights: `[T, choices]`. slots: int32 `[T]`, -1 for tokens without an adapter or local row.

    Returns:
      `[T, H]` in float32 (or float64).
    """
    return _forward(backend, hidden, down, route, pair, weights, slots)[0]


def _forward(backend, hidden, down, route, pair, weights, slots):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    down, pair, weights = jax.tree.map(jnp.asarray, (down, pair, weights))
    rows = backend.product(hidden, down, route.tables, (), (), (), contract=2)
    u = backend.shrink(hidden, route.tables, (pair.a,), (0,), (pair.scaling,))
    of_token = combine(_adapted(u[0], route), route.position, weights).astype(hidden.dtype)
    y = combine(rows, route.position, weights)
    y += _expand(backend, of_token, pair.b[:, 0], slots).astype(y.dtype)
    return y, (hidden, down, route, pair, weights, slots, rows, u)


def _adapted(u, route):
    """u as an array; zero for rows without an adapter, where it may hold anything."""
    return jnp.where((route.tables.row_slots >= 0)[:, None], jnp.asarray(u), 0)


def _expand(backend, u, b, slots):
    """u[t] · b[slots[t]]: a product with slots as groups, so with tokens in order of slots."""
    count, rank, _ = b.shape
    unit = max(u.shape[1], rank + -rank % RANK_UNIT)
    u = jnp.pad(u, ((0, 0), (0, unit - u.shape[1])))
    b = jnp.pad(b, ((0, 0), (0, unit - rank), (0, 0)))
    group = jnp.where(slots >= 0, slots, count)[:, None]
    route, rows = backend.dispatch(u, count, 1, group, jnp.full_like(slots, -1))
    y = backend.product(rows, b, route.tables, (), (), (), contract=1)
    return y[route.position[:, 0]]


def _backward(backend, saved, dy):
    """As if B had expanded every row: then dx takes one product, which adds A's part too."""
    hidden, down, route, pair, weights, slots, rows, u = saved
    pullback = jax.vjp(lambda *values: combine(values[0], route.position, values[1]), rows, weights)
    drows, dweights = pullback[1](dy)
    dhidden, (dpair,) = differentiable.gradients(
        backend, (down.shape[1],), hidden, down, route.tables, (pair,), u, drows
    )
    tables = backend.tables(None, slots, 1)
    (v,) = backend.shrink(dy.astype(hidden.dtype), tables, (pair.b,), (0,), (None,))
    v = jnp.where((slots >= 0)[:, None], jnp.asarray(v), 0).astype(dweights.dtype)
    of_choice = _adapted(u[0], route)[route.position].astype(dweights.dtype)
    dweights += jnp.sum(of_choice * v[:, None, :], axis=2)
    return dhidden, None, None, dpair, dweights, None


combined_down.defvjp(_forward, _backward)
