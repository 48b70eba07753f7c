"""`grouped_lora_matmul` and its gradients, over any backend.

A backend is a module (`xla`, `triton`, `mosaic_gpu`, `mosaic_tpu`) with these functions, none of
which is differentiable by itself. Letters as in `api.py`; u is a backend's own array type for
[M, R].

    check(x, w, lora, parts, out_dtype=None)
        Raises NotImplementedError, naming the shapes, for what it cannot serve.
    tables(group_sizes, row_slots, groups) -> tables
        All it needs to know about the rows, computed once for all products of a layer. Has
        `row_slots` (-1 for rows past the last group too) and `group_of_row`.
    dispatch(x, groups, slots, group, token_slots, valid) -> Route(token, position, tables), rows
        The same for (token, choice) rows, sorted by (group, slot), and each row's x; `slots` is how
        many there are. Rows of a number that is not one of a group, and those of tokens that are
        not valid (bool [T], None: all are), come after the last group.
    product(x, w, tables, u, factors, starts, *, contract, gate=None, out_dtype=None) -> [M, N]
        x[t] times its group's weight, contracted over w's axis `contract`: 2 for w [G, N, K],
        1 for w [G, K, N]. Then, for each term p in order,
        y[t, starts[p] : + width] += u[p][t] · factors[p][slot, group], factors[p] [S, G or 1, R,
        width]. Rows past the last group are zero. With a gate, N is [gate | up] and the result is
        the gate's function of both, [M, N / 2]. The result is the float32 sums rounded to x's
        dtype, or not rounded if out_dtype is float32, which comes without a gate.
    shrink(x, tables, factors, starts, scalings) -> u of each term
        u[p][t] = scalings[p][slot, group] · x[t, starts[p] : + width] · factors[p][slot, group]ᵀ,
        scaled in float32; a scaling of None is 1. Rows without an adapter may hold anything.
    outer(lefts, right, start, width, tables, shape, dtype) -> [*shape, rank, width] of each left
        lefts are (u, rank) pairs: u as `shrink` returns it, and how many of its columns count.
        Σ u[t, : rank] ⊗ right[t, start : start + width] over the rows of each (slot, group), or of
        each slot when shape is (S, 1): summed in float32 (float64 for float64), then rounded to
        dtype. right is a plain array.

All of them keep rows and slots apart (a NaN in one slot stays there) and give a row the same bits
whatever is around it.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_lora_matmul.gate import (
    Gate,
    gated_columns,
    gated_columns_gradient,
)
from pallas_kernels.kept import kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def grouped_lora_matmul(
    backend: ModuleType,
    parts: tuple[int, ...],
    gate: Gate | None,
    out_dtype: np.dtype | None,
    x,
    w,
    tables,
    lora,
    shared_u,
):
    """See `api.grouped_lora_matmul`; `parts` and `lora` are complete here.

    The gradient is that of a result in x's dtype: its cotangent is rounded to that before the
    backward product and the sums of `outer`.

    Args:
      shared_u: u of every term if it is known already, computed once for each token from shared
        A factors; else None. Its gradient flows through x and lora as if it were computed here.
    """
    terms = _terms(parts, lora)
    u = _shrink(backend, x, tables, terms) if shared_u is None else shared_u
    return _product(backend, x, w, tables, u, terms, gate, out_dtype)


def _forward(backend, parts, gate, out_dtype, x, w, tables, lora, shared_u):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    x, w, tables, lora = jax.tree.map(jnp.asarray, (x, w, tables, lora))
    terms = _terms(parts, lora)
    u = kept(_shrink(backend, x, tables, terms) if shared_u is None else shared_u)
    y = kept(_product(backend, x, w, tables, u, terms, None, out_dtype))
    before_gate = None
    if gate is not None:
        before_gate, y = y, gated_columns(y, gate)
    return y, (x, w, tables, lora, u, before_gate)


def _backward(backend, parts, gate, out_dtype, saved, dy):
    x, w, tables, lora, u, before_gate = saved
    if gate is not None:
        dy = gated_columns_gradient(before_gate, dy, gate)
    if out_dtype is not None:
        dy = dy.astype(x.dtype)
    dx, dlora = gradients(backend, parts, x, w, tables, lora, u, dy)
    return dx, None, None, dlora, None


def gradients(backend, parts, x, w, tables, lora, u, dy):
    """dx and dlora of a product without a gate; u is that of its forward pass."""
    terms = _terms(parts, lora)
    starts = tuple(start for start, _ in terms)
    pairs = tuple(pair for _, pair in terms)
    b, scalings = tuple(p.b for p in pairs), tuple(p.scaling for p in pairs)
    du = backend.shrink(dy, tables, b, starts, scalings) if pairs else ()
    a = tuple(p.a for p in pairs)
    dx = backend.product(dy, w, tables, du, a, (0,) * len(pairs), contract=1)
    da = a_gradients(backend, pairs, x, du, tables)
    of_pair = iter(
        type(pair)(
            da[i],
            b_gradient(backend, pair, dy, start, u[i], tables),
            scaling_gradient(backend, pair, x, dy, start, tables),
        )
        for i, (start, pair) in enumerate(terms)
    )
    dlora = tuple(None if pair is None else next(of_pair) for pair in lora)
    return dx.astype(x.dtype), dlora


grouped_lora_matmul.defvjp(_forward, _backward)


def _terms(parts, lora):
    """(start column, pair) of each part that has adapters."""
    starts = (sum(parts[:i]) for i in range(len(parts)))
    return [(start, pair) for start, pair in zip(starts, lora, strict=True) if pair is not None]


def _shrink(backend, x, tables, terms):
    if not terms:
        return ()
    a, scalings = (tuple(getattr(pair, name) for _, pair in terms) for name in ("a", "scaling"))
    return backend.shrink(x, tables, a, (0,) * len(terms), scalings)


def _product(backend, x, w, tables, u, terms, gate, out_dtype):
    factors, starts = tuple(pair.b for _, pair in terms), tuple(start for start, _ in terms)
    return backend.product(
        x, w, tables, u, factors, starts, contract=2, gate=gate, out_dtype=out_dtype
    )


def a_gradients(backend, pairs, x, du, tables):
    """dA of all terms whose A has the same slots, groups and dtype together: x is read once."""
    da = [None] * len(pairs)
    kinds = [(pair.a.shape[:2], pair.a.dtype) for pair in pairs]
    for shape, dtype in dict.fromkeys(kinds):
        same = [i for i, kind in enumerate(kinds) if kind == (shape, dtype)]
        lefts = tuple((du[i], _rank(pairs[i])) for i in same)
        found = backend.outer(lefts, x, 0, x.shape[1], tables, shape, dtype)
        for i, its in zip(same, found, strict=True):
            da[i] = its
    return da


def _rank(pair):
    return pair.a.shape[2]


def b_gradient(backend, pair, dy, start, u, tables):
    """dB of one term."""
    lefts, width = ((u, _rank(pair)),), pair.b.shape[3]
    return backend.outer(lefts, dy, start, width, tables, pair.b.shape[:2], pair.b.dtype)[0]


def scaling_gradient(backend, pair, x, dy, start, tables):
    """Σ u · v of each bucket's rows, unscaled: the trace of Σ u ⊗ v.

    Both are computed again, which `jit` drops when nobody asks for this gradient.
    """
    (u,) = backend.shrink(x, tables, (pair.a,), (0,), (None,))
    (v,) = backend.shrink(dy, tables, (pair.b,), (start,), (None,))
    # v may be wider than the rank; the trace ends there.
    v, exact = jnp.asarray(v), jnp.result_type(jnp.float32, x.dtype, pair.a.dtype)
    slots, (more, groups) = pair.a.shape[0], pair.scaling.shape
    lefts = ((u, _rank(pair)),)
    (products,) = backend.outer(lefts, v, 0, v.shape[1], tables, (slots, groups), exact)
    of_slots = jnp.trace(products, axis1=2, axis2=3).astype(pair.scaling.dtype)
    return jnp.pad(of_slots, ((0, more - slots), (0, 0)))
