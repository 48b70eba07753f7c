"""The down product and the weighted sum of each token's rows, with one gradient.

    y[t] = Σ_k weights[t, k] · (hidden[t, k] · Wᵀ + u[t, k] · B)

Where all experts share B, rows are added up before B expands them, for a k-th of the work:

    y[t] = Σ_k weights[t, k] · hidden[t, k] · Wᵀ  +  (Σ_k weights[t, k] · u[t, k]) · B[slot of t]

The gradient takes no weights on the way back through W: what comes out of it, times hidden, is also
the gradient of the weights. So the product's rows are needed only in the forward pass.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_lora_matmul import differentiable
from pallas_kernels.kept import kept
from pallas_kernels.routing_plan.api import combine, rows_of_choices

RANK_UNIT = 8  # kernels multiply whole units of rank


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_down(backend: ModuleType, hidden, down, route, pair, weights, slots):
    """The weighted sums of each token's rows times `down`, with its adapter.

    Args:
      hidden: `[M, I]`, rows of the route. down: `[E, H, I]`.
      pair: `Lora` with a `[S, E or 1, R, I]` and b `[S, E or 1, R, H]`, or None.
      weights: `[T, choices]`. slots: int32 `[T]`, -1 for tokens without an adapter or local row.

    Returns:
      `[T, H]` in float32 (or float64).
    """
    return _forward(backend, hidden, down, route, pair, weights, slots)[0]


def _forward(backend, hidden, down, route, pair, weights, slots):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    hidden, down, pair, weights = jax.tree.map(jnp.asarray, (hidden, down, pair, weights))
    u = ()
    if pair is not None:
        u = backend.shrink(hidden, route.tables, (pair.a,), (0,), (pair.scaling,))
    shared = pair is not None and pair.b.shape[1] == 1 < down.shape[0]
    of_rows = (u, (pair.b,), (0,)) if pair is not None and not shared else ((), (), ())
    rows = backend.product(hidden, down, route.tables, *of_rows, contract=2)
    y = combine(rows, route.position, weights)
    if shared:
        of_token = combine(_adapted(u[0], route), route.position, weights).astype(hidden.dtype)
        y += _expand(backend, of_token, pair.b[:, 0], slots).astype(y.dtype)
    return y, (hidden, down, route, pair, weights, kept(u))


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
    route, rows = backend.dispatch(u, count, 1, group, jnp.full_like(slots, -1), None)
    y = backend.product(rows, b, route.tables, (), (), (), contract=1)
    return y[route.position[:, 0]]


def _backward(backend, saved, dy):
    hidden, down, route, pair, weights, u = saved
    token, of_row = rows_of_choices(route.position, weights)
    drows = dy.astype(hidden.dtype)[token]
    du, factors, starts = (), (), ()
    if pair is not None:
        du = backend.shrink(drows, route.tables, (pair.b,), (0,), (pair.scaling,))
        factors, starts = (pair.a,), (0,)
    unweighted = backend.product(drows, down, route.tables, du, factors, starts, contract=1)
    wide = jnp.promote_types(jnp.float32, hidden.dtype)
    unweighted, of_row = unweighted.astype(wide), of_row.astype(wide)
    dots = jnp.sum(unweighted * hidden.astype(wide), axis=1)
    dweights = dots[route.position].astype(weights.dtype)
    dhidden = (unweighted * of_row[:, None]).astype(hidden.dtype)
    dpair = None
    if pair is not None:
        dpair = _pair_gradient(backend, pair, hidden, drows, of_row, u, du, route.tables)
    return dhidden, None, None, dpair, dweights, None


def _pair_gradient(backend, pair, hidden, drows, of_row, u, du, tables):
    """The rows' weights go into u, the narrowest of the factors."""

    def weighted(values):
        return (values.astype(of_row.dtype) * of_row[:, None]).astype(values.dtype)

    (u,), du = jax.tree.map(weighted, (u, du))
    (da,) = differentiable.a_gradients(backend, (pair,), hidden, du, tables)
    db = differentiable.b_gradient(backend, pair, drows, 0, u, tables)
    dscaling = differentiable.scaling_gradient(backend, pair, hidden, weighted(drows), 0, tables)
    return type(pair)(da, db, dscaling)


weighted_down.defvjp(_forward, _backward)
