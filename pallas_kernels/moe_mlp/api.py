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
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_lora_matmul import differentiable
from pallas_kernels.grouped_lora_matmul.api import Lora, check_call, choose_backend
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.moe_mlp.dispatch import dispatch
from pallas_kernels.moe_mlp.down import weighted_down
from pallas_kernels.routing_plan.api import local_groups


def moe_mlp(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens choices"],
    weights: Float[Array, "tokens choices"],
    token_slots: Int[Array, " tokens"],
    gate_up: Float[Array, "experts twice_width hidden"],
    down: Float[Array, "experts hidden width"],
    lora_gate: Lora | None = None,
    lora_up: Lora | None = None,
    lora_down: Lora | None = None,
    *,
    gate: Gate | None = None,
    first_group: int | Int[Array, ""] = 0,
    valid: Bool[Array, " tokens"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens hidden"]:
    """Routes tokens to their experts, and sums what these make of them.

    Differentiable with respect to x, weights and the adapters. Exactness and isolation as in
    `grouped_lora_matmul`: a token's bits depend on that token alone.

    Args:
      experts: chosen experts of each token, counted over all devices.
      weights: what each choice counts.
      token_slots: adapter slot of each token, -1 for none.
      gate_up: `[E, 2 I, H]`, gate first. down: `[E, H, I]`.
      lora_gate, lora_up: adapters `[S, E or 1, R, H]` and `[S, E or 1, R, I]`; where A is shared
        by all experts, x·Aᵀ is computed once for each token.
      lora_down: adapters `[S, E or 1, R, I]` and `[S, E or 1, R, H]`; where B is shared, it
        multiplies the weighted sum of a token's rows, once for each token.
      gate: the activation; default silu.
      first_group: the first local expert. Choices of other devices' experts add nothing.
      valid: False for padding tokens, which no expert works on.
      implementation: as in `grouped_lora_matmul`.

    Returns:
      `[T, H]`, summed over the choices in order, in float32 (or float64).

    Raises:
      ValueError: shapes that do not belong together.
      NotImplementedError: an implementation that cannot serve these shapes.
    """
    count, twice, _ = gate_up.shape
    if experts.shape != weights.shape or experts.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"experts {experts.shape} and weights {weights.shape} must both be "
            f"[{x.shape[0]}, choices]"
        )
    parts, into = (twice // 2, twice // 2), (lora_gate, lora_up)
    rows = experts.size
    wide = jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype)
    narrow = jax.ShapeDtypeStruct((rows, twice // 2), x.dtype)
    slots = jax.ShapeDtypeStruct((rows,), token_slots.dtype)
    sizes = jax.ShapeDtypeStruct((count,), experts.dtype)
    calls = (wide, gate_up, into, parts), (narrow, down, (lora_down,), (down.shape[1],))
    for rows, w, lora, widths in calls:
        check_call(rows, w, sizes, slots, lora, widths)
    if len({pair.a.shape[0] for pair in (*into, lora_down) if pair is not None}) > 1:
        raise ValueError("lora_gate, lora_up and lora_down must have the same number of slots")
    backend = _common_backend(implementation, calls)
    pairs = [pair for pair in (*into, lora_down) if pair is not None]
    slots = pairs[0].a.shape[0] if pairs else 0
    if not pairs:
        token_slots = jnp.full_like(token_slots, -1)
    route, rows = dispatch(backend, count, slots, x, experts - first_group, token_slots, valid)
    hidden = differentiable.grouped_lora_matmul(
        backend,
        parts,
        gate or Gate(),
        None,
        rows,
        gate_up,
        route.tables,
        into,
        _shared_u(backend, x, token_slots, into, count, route),
    )
    group = local_groups(experts, count, first_group, valid)
    slots = jnp.where(jnp.any(group < count, axis=1), token_slots, -1)
    return weighted_down(backend, hidden, down, route, lora_down, weights, slots)


def _common_backend(implementation, calls) -> ModuleType:
    """One backend for the whole layer: its products share their tables."""
    backends = [choose_backend(implementation, *call) for call in calls]
    return backends[0] if backends[0] is backends[1] else choose_backend("xla", *calls[0])


def _shared_u(backend, x, token_slots, lora, groups, route):
    """u of each row from x·Aᵀ of each token, where all experts share A; else None."""
    pairs = [pair for pair in lora if pair is not None]
    if not pairs or groups == 1 or any(pair.a.shape[1] > 1 for pair in pairs):
        return None
    # Their gradient is that of the product that u goes into.
    x, pairs = lax.stop_gradient((x, pairs))
    one = [pair.scaling.shape[1] == 1 for pair in pairs]
    u = backend.shrink(
        x,
        backend.tables(None, token_slots, 1),
        tuple(pair.a for pair in pairs),
        (0,) * len(pairs),
        tuple(pair.scaling if its else None for pair, its in zip(pairs, one, strict=True)),
    )
    rows = [values[route.token] for values in u]
    return tuple(
        values if its else _scaled(values, pair.scaling, route.tables)
        for values, pair, its in zip(rows, pairs, one, strict=True)
    )


def _scaled(u, scaling, tables):
    """u times the scaling of each row's slot and expert, whatever arrays u is made of."""
    of_row = jnp.asarray(scaling)[jnp.maximum(tables.row_slots, 0), tables.group_of_row][:, None]

    def scale(values):
        wide = values.astype(jnp.promote_types(jnp.float32, values.dtype))
        return (wide * of_row).astype(values.dtype)

    return jax.tree.map(scale, u)
