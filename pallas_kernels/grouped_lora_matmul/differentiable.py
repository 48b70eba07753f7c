"""`grouped_lora_matmul` and its gradients, over any backend.

A backend is a module (`xla`, `triton`, `mosaic_gpu`, `mosaic_tpu`) with these functions, none of
which is differentiable by itself. Letters as in `api.py`; u is a backend's own array type for
[M, R].

    READS_LAYERS
        Whether w, bias, factors and scalings may be `Layered`, all of one layer.
    check(x, w, lora, parts, out_dtype=None)
        Raises NotImplementedError, naming the shapes, for what it cannot serve.
    tables(group_sizes, row_slots, groups) -> tables
        All it needs to know about the rows, computed once for all products of a layer. Has
        `row_slots` (-1 for rows past the last group too) and `group_of_row`.
    dispatch(x, groups, slots, group, token_slots, valid, terms=())
            -> Route(token, position, tables), rows, u
        The same for (token, choice) rows, sorted by (group, slot), and each row's x; `slots` is how
        many there are. Rows of a number that is not one of a group, and those of tokens that are
        not valid (bool [T], None: all are), come after the last group. u is what
        `shrink_for_product` gives of the `Term`s, all of all of x, where laying rows out makes it;
        else None.
    product(x, w, tables, u, factors, starts, firsts, *, contract, gate=None, out_dtype=None,
            bias=None) -> [M, N]
        x[t] times its group's weight, contracted over w's axis `contract`: 2 for w [G, N, K],
        1 for w [G, K, N]. Then, for each term p in order that has the row's slot,
        y[t, starts[p] : + width] += u[p][t] · factors[p][slot - firsts[p], group], factors[p]
        [S, G or 1, R, width], and after all of them bias [G, N] of its group, which has x's dtype.
        Rows past the last group are zero. With a gate, N is [gate | up] and
        the result is the gate's function of both, [M, N / 2]. The result is the float32 sums
        rounded to x's dtype, or not rounded if out_dtype is float32, which comes without a gate.
    shrink(x, tables, factors, starts, scalings, firsts) -> u of each term
        u[p][t] = scalings[p][slot - firsts[p], group] · x[t, starts[p] : + width] ·
        factors[p][slot - firsts[p], group]ᵀ, scaled in float32; a scaling of None is 1. Rows whose
        slot the term does not have may hold anything.
    shrink_for_product(x, tables, factors, starts, scalings, firsts) -> u of each term
        The same for a u that goes into one `product` with this x, and nowhere else: where that
        product makes u itself, this is what it makes it of. Here all terms are of all of x.
    NORMED_ROWS
        So many rows `normed_product` may take. 0: there is none.
    normed_product(x, more, weight, eps, w, tables, terms, *, gate=None, out_dtype=None, bias=None)
            -> y, the sum if there is more, the normed x; or None
        A product, and before it `rms_norm` of x, or `add_norm` of x and more, in one kernel.
        None: not of these. Bits are those of the norm and of a product with `shrink_for_product`.
    EXPERTS_AT_ONCE
        So many rows of a MoE layer `experts` may take. 0: there is none.
    experts(x, gate_up, bias, down, tables, into, out, gate) -> [M, H], or None
        The gate's function of x times each row's gate_up [G, 2 I, K], with its bias [G, 2 I] or
        None, times its down [G, H, I], with the `Term`s of both, in one kernel. None: not of these.
        Bits are those of two products.
    ROUTED_AT_ONCE
        So many rows of a MoE layer `routed_experts` may take. 0: there is none.
    routed_experts(x, logits, tokens, correction, choice, gate_up, bias, down, into, out, gate)
            -> [M, H], experts [T, choices], weights float32 [T, choices], or None
        The same of x [T, K], with the experts that `top_experts` chooses by logits [T, E], float32
        correction [E] or None, and choice (top_k, scoring); rows are in order of the choices.
        tokens is int32 [T]: the slot of each + 1, or -1 where no expert works on it. Bits are those
        of `top_experts` and `experts`.
    add_choices(residual, rows, weights, dtype) -> [T, H], or None
        residual [T, H] + the sum of each token's rows [T * choices, H], in order of choices, times
        weights float32 [T, choices], rounded to a dtype; only of a backend that has
        `routed_experts`. Bits are those of `routing_plan.combine`, rounded, and the addition.
    outer(lefts, right, spans, tables, first, shape, dtype) -> [*shape, rank, width] of each
        lefts are (u, rank) pairs: u as `shrink` returns it, and how many of its columns count;
        each has a span (start, width).
        Σ u[t, : rank] ⊗ right[t, start : start + width] over the rows of each (slot, group), or of
        each slot when shape is (S, 1): summed in float32 (float64 for float64), then rounded to
        dtype. Slots are shape[0] from `first` on. right is a plain array.

    SHRINKS_WITH_OUTER
        Whether there is `shrink_with_outer`.
    shrink_with_outer(lefts, right, tables, factors, starts, scalings, firsts)
            -> (u of each term, [S, G, rank, width] of each), or None
        `shrink` of right, and `outer` of lefts and the same columns of right for the buckets that
        factors are of, rounded to their dtype, in one kernel that reads right once. None: not of
        these. Bits are those of both.

Slots come in rank classes, and each term of a part is one class: term p has the slots
[firsts[p], firsts[p] + factors[p].shape[0]). Terms go class by class, each with the same parts in
the same order, and those of a call together have every slot that a row has.

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
from pallas_kernels.grouped_lora_matmul.lora import Lora, in_form, terms_of_parts
from pallas_kernels.kept import kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def grouped_lora_matmul(
    backend: ModuleType,
    parts: tuple[int, ...],
    gate: Gate | None,
    out_dtype: np.dtype | None,
    x,
    w,
    bias,
    tables,
    lora,
    known_u,
):
    """See `api.grouped_lora_matmul`; `parts` and `lora` are complete here.

    The gradient is that of a result in x's dtype: its cotangent is rounded to that before the
    backward product and the sums of `outer`.

    Args:
      known_u: `Once` u of every term if it is known already, where rows were laid out, or computed
        once for each token from shared A factors; else None. Its gradient flows through x and lora
        as if it were computed here.
    """
    terms = terms_of_parts(parts, lora)
    u = known_u.values if known_u else _shrink(backend.shrink_for_product, x, tables, terms)
    return _product(backend, x, w, bias, tables, u, terms, gate, out_dtype)


def _forward(backend, parts, gate, out_dtype, x, w, bias, tables, lora, known_u):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    x, w, bias, tables, lora = jax.tree.map(jnp.asarray, (x, w, bias, tables, lora))
    terms = terms_of_parts(parts, lora)
    u = kept(known_u.values if known_u else _shrink(backend.shrink, x, tables, terms))
    y = kept(_product(backend, x, w, bias, tables, u, terms, None, out_dtype))
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
    return dx, None, None, None, dlora, None


def gradients(backend, parts, x, w, tables, lora, u, dy):
    """dx and dlora of a product without a gate; u is that of its forward pass."""
    terms = terms_of_parts(parts, lora)
    firsts = tuple(term.first for term in terms)
    a = tuple(term.pair.a for term in terms)
    du, db = shrink_with_b_gradients(backend, terms, dy, u, tables)
    dx = backend.product(dy, w, tables, du, a, (0,) * len(terms), firsts, contract=1)
    da = a_gradients(backend, terms, x, du, tables)
    count = sum(entry is not None for entry in lora)
    of_term = [None] * len(terms)
    for part in range(count):
        its = slice(part, None, count)
        dscaling = scaling_gradients(backend, terms[its], x, dy, tables)
        of_term[its] = map(Lora, da[its], db[its], dscaling)
    return dx.astype(x.dtype), in_form(lora, of_term)


grouped_lora_matmul.defvjp(_forward, _backward)


def _shrink(shrink, x, tables, terms):
    if not terms:
        return ()
    a, scalings = (tuple(getattr(term.pair, name) for term in terms) for name in ("a", "scaling"))
    firsts = tuple(term.first for term in terms)
    return shrink(x, tables, a, (0,) * len(terms), scalings, firsts)


def _product(backend, x, w, bias, tables, u, terms, gate, out_dtype):
    factors = tuple(term.pair.b for term in terms)
    starts, firsts = (tuple(getattr(term, name) for term in terms) for name in ("start", "first"))
    arrays = x, w, tables, u, factors, starts, firsts
    return backend.product(*arrays, contract=2, gate=gate, out_dtype=out_dtype, bias=bias)


def shrink_with_b_gradients(backend, terms, dy, u, tables):
    """du of dy, and dB, of all terms."""
    if not terms:
        return (), []
    starts, firsts = (tuple(getattr(term, name) for term in terms) for name in ("start", "first"))
    b, scalings = (tuple(getattr(term.pair, name) for term in terms) for name in ("b", "scaling"))
    arrays = dy, tables, b, starts, scalings, firsts
    found = None
    if backend.SHRINKS_WITH_OUTER:
        lefts = tuple((its, _rank(term)) for its, term in zip(u, terms, strict=True))
        found = backend.shrink_with_outer(lefts, *arrays)
    return found or (backend.shrink(*arrays), b_gradients(backend, terms, dy, u, tables))


def a_gradients(backend, terms, x, du, tables):
    """dA of all terms."""
    spans = [(0, x.shape[1])] * len(terms)
    return _factor_gradients(backend, terms, [term.pair.a for term in terms], du, x, spans, tables)


def b_gradients(backend, terms, dy, u, tables):
    """dB of all terms."""
    b = [term.pair.b for term in terms]
    spans = [(term.start, its.shape[3]) for term, its in zip(terms, b, strict=True)]
    return _factor_gradients(backend, terms, b, u, dy, spans, tables)


def _factor_gradients(backend, terms, factors, u, right, spans, tables):
    """Those of the same slots, groups and dtype together: what they share is read once."""
    found = [None] * len(terms)
    kinds = [
        (term.first, factor.shape[:2], factor.dtype)
        for term, factor in zip(terms, factors, strict=True)
    ]
    for kind in dict.fromkeys(kinds):
        same = [i for i, its in enumerate(kinds) if its == kind]
        lefts = tuple((u[i], _rank(terms[i])) for i in same)
        its_spans = tuple(spans[i] for i in same)
        for i, its in zip(same, backend.outer(lefts, right, its_spans, tables, *kind), strict=True):
            found[i] = its
    return found


def _rank(term):
    return term.pair.a.shape[2]


def scaling_gradients(backend, terms, x, dy, tables):
    """Σ u · v of each bucket's rows, unscaled: the trace of Σ u ⊗ v. Of the terms of one part.

    Both are computed again, which `jit` drops when nobody asks for this gradient.
    """
    a, b = (tuple(getattr(term.pair, name) for term in terms) for name in ("a", "b"))
    starts, firsts = (tuple(getattr(term, name) for term in terms) for name in ("start", "first"))
    zeros, ones = (0,) * len(terms), (None,) * len(terms)
    u = backend.shrink(x, tables, a, zeros, ones, firsts)
    v = backend.shrink(dy, tables, b, starts, ones, firsts)

    def of_term(term, u, v):
        a, scaling = term.pair.a, term.pair.scaling
        # v may be wider than the rank; the trace ends there.
        v, exact = jnp.asarray(v), jnp.result_type(jnp.float32, x.dtype, a.dtype)
        lefts, spans = ((u, _rank(term)),), ((0, v.shape[1]),)
        (products,) = backend.outer(lefts, v, spans, tables, term.first, scaling.shape, exact)
        return jnp.trace(products, axis1=2, axis2=3).astype(scaling.dtype)

    return list(map(of_term, terms, u, v))
