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
from pallas_kernels.grouped_lora_matmul.lora import Lora, has_slot, in_form, terms_of_part
from pallas_kernels.kept import kept, map_once
from pallas_kernels.routing_plan.api import combine, rows_of_choices
from pallas_kernels.row_reduce.api import scaled_and_dot

RANK_UNIT = 8  # kernels multiply whole units of rank


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_down(backend: ModuleType, hidden, down, route, entry, weights, slots):
    """The weighted sums of each token's rows times `down`, with its adapter.

    Args:
      hidden: `[M, I]`, rows of the route. down: `[E, H, I]`.
      entry: `Lora` with a `[S, E or 1, R, I]` and b `[S, E or 1, R, H]`, its rank classes, or None.
      weights: `[T, choices]`. slots: int32 `[T]`, -1 for tokens without an adapter or local row.

    Returns:
      `[T, H]` in float32 (or float64).
    """
    shrink = backend.shrink_for_product
    return _weighted(backend, shrink, hidden, down, route, entry, weights, slots)[0]


def _forward(backend, hidden, down, route, entry, weights, slots):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    hidden, down, entry, weights = jax.tree.map(jnp.asarray, (hidden, down, entry, weights))
    y, u = _weighted(backend, backend.shrink, hidden, down, route, entry, weights, slots)
    return y, (hidden, down, route, entry, weights, kept(u))


def _weighted(backend, shrink, hidden, down, route, entry, weights, slots):
    """The weighted sums, and u of every term, which `shrink` computes."""
    terms, u = terms_of_part(0, entry), ()
    zeros, firsts = (0,) * len(terms), tuple(term.first for term in terms)
    a, b, scalings = (tuple(getattr(term.pair, name) for term in terms) for name in Lora._fields)
    shared = bool(terms) and b[0].shape[1] == 1 < down.shape[0]
    if terms:
        # Rows' u are added up before the product of a shared B.
        shrink = backend.shrink if shared else shrink
        u = shrink(hidden, route.tables, a, zeros, scalings, firsts)
    of_rows = ((), (), (), ()) if shared else (u, b, zeros, firsts)
    rows = backend.product(hidden, down, route.tables, *of_rows, contract=2)
    y = combine(rows, route.position, weights)
    if shared:
        arrays = [jnp.asarray(its) for its in u]
        of_row = _adapted(arrays, terms, route)
        of_token = combine(of_row, route.position, weights).astype(hidden.dtype)
        for term, its in zip(terms, arrays, strict=True):
            y += _expand(backend, of_token[:, : its.shape[1]], term, slots).astype(y.dtype)
    return y, u


def _adapted(u, terms, route):
    """u of all classes as one array; zero where a row's slot has no rank, or it has no slot."""
    width, total = max(its.shape[1] for its in u), 0
    for term, its in zip(terms, u, strict=True):
        mine = has_slot(route.tables.row_slots, term.first, term.pair.a.shape[0])
        its = jnp.pad(its, ((0, 0), (0, width - its.shape[1])))
        total = jnp.where(mine[:, None], its, total)
    return total


def _expand(backend, u, term, slots):
    """u[t] · b[slots[t]] for the term's slots, zero for others: a product with slots as groups, so
    with tokens in order of slots."""
    b = term.pair.b[:, 0]
    count, rank, _ = b.shape
    unit = max(u.shape[1], rank + -rank % RANK_UNIT)
    u = jnp.pad(u, ((0, 0), (0, unit - u.shape[1])))
    b = jnp.pad(b, ((0, 0), (0, unit - rank), (0, 0)))
    mine = has_slot(slots, term.first, count)
    group = jnp.where(mine, slots - term.first, count)[:, None]
    route, rows, _ = backend.dispatch(u, count, 1, group, jnp.full_like(slots, -1), None)
    y = backend.product(rows, b, route.tables, (), (), (), (), contract=1)
    return y[route.position[:, 0]]


def _backward(backend, saved, dy):
    hidden, down, route, entry, weights, u = saved
    terms = terms_of_part(0, entry)
    zeros, firsts = (0,) * len(terms), tuple(term.first for term in terms)
    a = tuple(term.pair.a for term in terms)
    token, of_row = rows_of_choices(route.position, weights)
    drows = dy.astype(hidden.dtype)[token]

    def weighted(values):
        # In the sums' precision.
        exact = of_row.astype(jnp.promote_types(jnp.float32, hidden.dtype))[:, None]
        return (values.astype(exact.dtype) * exact).astype(values.dtype)

    # The rows' weights go into u, the narrowest of the factors.
    tables, lefts = route.tables, map_once(weighted, u)
    du, db = differentiable.shrink_with_b_gradients(backend, terms, drows, lefts, tables)
    unweighted = backend.product(drows, down, tables, du, a, zeros, firsts, contract=1)
    dhidden, dots = scaled_and_dot(unweighted, hidden, of_row[:, None])
    dweights = dots[route.position, 0].astype(weights.dtype)
    dentry = None
    if terms:
        da = differentiable.a_gradients(backend, terms, hidden, map_once(weighted, du), tables)
        dscaling = differentiable.scaling_gradients(backend, terms, hidden, weighted(drows), tables)
        dentry = in_form((entry,), list(map(Lora, da, db, dscaling)))[0]
    return dhidden, None, None, dentry, dweights, None


weighted_down.defvjp(_forward, _backward)
