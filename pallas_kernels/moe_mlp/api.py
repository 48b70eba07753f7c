"""`moe_mlp`: the routed experts of a layer as one function, the same on every platform.

    y[t] = Σ_k weights[t, k] · down_e(gate_e(x[t]) gated with up_e(x[t])),  e = experts[t, k]

Rows are sorted once; their order, and what the kernels need to know about it, serves gate/up and
down. Letters: T tokens, E local experts, H hidden width, I expert width.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_lora_matmul import xla
from pallas_kernels.grouped_lora_matmul.api import (
    check_bias,
    check_call,
    check_slots,
    choose_backend,
    in_backend_form,
)
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.lora import Slots, classes_of, slot_counts, terms_of_parts
from pallas_kernels.kept import map_once
from pallas_kernels.moe_mlp.dispatch import dispatch
from pallas_kernels.moe_mlp.experts import experts as experts_of
from pallas_kernels.once import Once
from pallas_kernels.routing_plan.api import check_tokens, expert_ids, local_groups


def moe_mlp(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens choices"],
    weights: Float[Array, "tokens choices"],
    token_slots: Int[Array, " tokens"],
    gate_up: Float[Array, "experts twice_width hidden"],
    down: Float[Array, "experts hidden width"],
    lora_gate: Slots | None = None,
    lora_up: Slots | None = None,
    lora_down: Slots | None = None,
    *,
    gate_up_bias: Float[Array, "experts twice_width"] | None = None,
    gate: Gate | None = None,
    first_group: int | Int[Array, ""] = 0,
    valid: Bool[Array, " tokens"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens hidden"]:
    """Routes tokens to their experts, and sums what these make of them.

    Differentiable with respect to x, weights and the adapters (once, where all experts share A of
    gate and up). Exactness and isolation as in `grouped_lora_matmul`: a token's bits depend on that
    token alone.

    Args:
      experts: chosen experts of each token, counted over all devices.
      weights: what each choice counts.
      token_slots: adapter slot of each token, -1 for none.
      gate_up: `[E, 2 I, H]`, gate first. down: `[E, H, I]`. Both, and adapters, may be `Layered`.
      lora_gate, lora_up: adapters `[S, E or 1, R, H]` and `[S, E or 1, R, I]`; where A is shared
        by all experts, x·Aᵀ is computed once for each token.
      lora_down: adapters `[S, E or 1, R, I]` and `[S, E or 1, R, H]`; where B is shared, it
        multiplies the weighted sum of a token's rows, once for each token. All three may have
        rank classes, of the same slots.
      gate_up_bias: `[E, 2 I]` in x's dtype, see `grouped_lora_matmul`. It has no gradient, and may
        be `Layered`.
      gate: the activation; default silu.
      first_group: the first local expert. Choices of other devices' experts add nothing.
      valid: False for padding tokens, which no expert works on. Their weights count zeros, and so
        are to be finite.
      implementation: as in `grouped_lora_matmul`.

    Returns:
      `[T, H]`, summed over the choices in order, in float32 (or float64).

    Raises:
      ValueError: shapes that do not belong together.
      NotImplementedError: an implementation that cannot serve these shapes, or a second gradient.
    """
    count, twice, _ = gate_up.shape
    alike = experts.shape == weights.shape and experts.shape[:1] == x.shape[:1]
    if not alike or experts.ndim != 2 or experts.shape[1] == 0:
        raise ValueError(
            f"experts {experts.shape} and weights {weights.shape} must both be "
            f"[{x.shape[0]}, choices], with a choice at least"
        )
    if down.shape != (count, x.shape[1], twice // 2):
        raise ValueError(
            f"down must be [{count}, {x.shape[1]}, {twice // 2}], as gate_up {gate_up.shape} and x "
            f"{x.shape} say, got {down.shape}"
        )
    experts = expert_ids(experts)
    check_tokens(x.shape[0], token_slots, valid)
    parts, into = (twice // 2, twice // 2), (lora_gate, lora_up)
    of_layer = gate_up, gate_up_bias, down, into, lora_down
    backend = backend_of(implementation, x, experts, token_slots, *of_layer)
    weights_of_layer = gate_up, gate_up_bias, down, into, lora_down
    gate_up, gate_up_bias, down, into, lora_down = in_backend_form(backend, weights_of_layer)
    slots = max(sum(slot_counts(entry)) for entry in (*into, lora_down))
    if not slots:
        token_slots = jnp.full_like(token_slots, -1)
    of_tokens = _shares_a(into, count)
    of_rows = (None, None) if of_tokens else into
    arguments = x, experts - first_group, token_slots, valid, of_rows
    route, rows, u = dispatch(backend, count, slots, *arguments)
    if of_tokens:
        u = _shared_u(backend, x, token_slots, into, route)
    group = local_groups(experts, count, first_group, valid)
    slots = jnp.where(jnp.any(group < count, axis=1), token_slots, -1)
    lora = into, lora_down
    products = rows, gate_up, gate_up_bias, down, route, lora, u, weights, slots
    return experts_of(backend, parts, gate or Gate(), *products)


def backend_of(
    implementation, x, experts, token_slots, gate_up, gate_up_bias, down, into, lora_down
) -> ModuleType:
    """What serves a layer: one backend for all of it, as its products share their tables.

    Args:
      experts: array, or shape and dtype, [T, choices]. into: the adapters of gate and of up.

    Raises:
      See `moe_mlp`.
    """
    (count, twice, _), rows = gate_up.shape, experts.size
    wide = jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype)
    narrow = jax.ShapeDtypeStruct((rows, twice // 2), x.dtype)
    slots = jax.ShapeDtypeStruct((rows,), token_slots.dtype)
    sizes = jax.ShapeDtypeStruct((count,), experts.dtype)
    parts = twice // 2, twice // 2
    calls = (wide, gate_up, into, parts), (narrow, down, (lora_down,), (down.shape[1],))
    for rows, w, lora, widths in calls:
        check_call(rows, w, sizes, slots, lora, widths)
    check_slots((*into, lora_down), "lora_gate, lora_up and lora_down")
    check_bias("gate_up_bias", gate_up_bias, x, gate_up)
    backends = [choose_backend(implementation, *call) for call in calls]
    return backends[0] if backends[0] is backends[1] else choose_backend("xla", *calls[0])


def _shares_a(lora, groups: int) -> bool:
    """Whether all experts, of several, share A."""
    pairs = [pair for entry in lora for pair in classes_of(entry)]
    return bool(pairs) and groups > 1 and all(pair.a.shape[1] == 1 for pair in pairs)


def _shared_u(backend, x, token_slots, lora, route):
    """u of each row from x·Aᵀ of each token, where all experts share A.

    Their gradients are those of the product that u goes into. That of a gradient, for which u is
    data, would lack what u is made of: it is refused, which kernels do by themselves.
    """
    if backend is xla:
        return _differentiable_once(x, token_slots, lora, route)
    return _rows_of_tokens(backend, *lax.stop_gradient((x, token_slots, lora)), route)


@jax.custom_vjp
def _differentiable_once(*arguments):
    return _rows_of_tokens(xla, *arguments)


def _once_forward(*arguments):
    # This is what a second gradient comes to.
    return _differentiable_once(*jax.tree.map(lambda its: its.value, arguments)), None


def _once_backward(saved, du):
    del saved
    if any(type(its) is not SymbolicZero for its in jax.tree.leaves(du)):
        raise NotImplementedError("moe_mlp is differentiable once where all experts share A")
    return None, None, None, None


_differentiable_once.defvjp(_once_forward, _once_backward, symbolic_zeros=True)


def _rows_of_tokens(backend, x, token_slots, lora, route):
    terms = terms_of_parts((0,) * len(lora), lora)
    one = [term.pair.scaling.shape[1] == 1 for term in terms]
    u = backend.shrink(
        x,
        backend.tables(None, token_slots, 1),
        tuple(term.pair.a for term in terms),
        (0,) * len(terms),
        tuple(term.pair.scaling if its else None for term, its in zip(terms, one, strict=True)),
        tuple(term.first for term in terms),
    )
    rows = list(map_once(lambda values: values[route.token], u))
    count = sum(entry is not None for entry in lora)
    for part in range(count):
        if not one[part]:
            classes = slice(part, None, count)
            rows[classes] = _scaled(rows[classes], terms[classes], route.tables)
    return Once.of(tuple(rows))


def _scaled(u, terms, tables):
    """u of a part's classes times the scaling of each row's slot and expert."""
    of_row = None
    for term in terms:
        slot = jnp.maximum(tables.row_slots - term.first, 0)
        its = jnp.asarray(term.pair.scaling)[slot, tables.group_of_row][:, None]
        after = (tables.row_slots >= term.first)[:, None]
        of_row = its if of_row is None else jnp.where(after, its, of_row)

    def scale(values):
        wide = values.astype(jnp.promote_types(jnp.float32, values.dtype))
        return (wide * of_row).astype(values.dtype)

    return map_once(scale, u)
