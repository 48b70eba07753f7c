"""`routed_mlp`: the choice of experts, and what these make of it.

The definition is that of its parts, `top_experts` and `moe_mlp`; of very few tokens a backend may
have one kernel for both, with the same bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_lora_matmul.api import in_backend_form
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.lora import (
    Slots,
    slot_counts,
    terms_of_part,
    terms_of_parts,
)
from pallas_kernels.moe_mlp.api import backend_of, moe_mlp
from pallas_kernels.one_kernel import kernel_or_parts
from pallas_kernels.rounded import added, rounded
from pallas_kernels.routing_plan.api import combine
from pallas_kernels.top_experts.api import top_experts
from pallas_kernels.top_experts.xla import Scoring


class _Choice(NamedTuple):
    top_k: int
    scoring: Scoring


class _Layer(NamedTuple):
    """The weights of a layer; see `moe_mlp`."""

    gate_up: jax.Array
    gate_up_bias: jax.Array | None
    down: jax.Array
    into: tuple[Slots | None, Slots | None]
    lora_down: Slots | None


def routed_mlp(
    x: Float[Array, "tokens hidden"],
    logits: Float[Array, "tokens experts"],
    token_slots: Int[Array, " tokens"],
    gate_up: Float[Array, "experts twice_width hidden"],
    down: Float[Array, "experts hidden width"],
    lora_gate: Slots | None = None,
    lora_up: Slots | None = None,
    lora_down: Slots | None = None,
    *,
    top_k: int,
    scoring: Scoring,
    correction: Float[Array, " experts"] | None = None,
    gate_up_bias: Float[Array, "experts twice_width"] | None = None,
    gate: Gate | None = None,
    valid: Bool[Array, " tokens"] | None = None,
    residual: Float[Array, "tokens hidden"] | None = None,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "tokens hidden"], Int[Array, "tokens choices"], Float[Array, "tokens choices"]
]:
    """Chooses the experts of tokens by their router's logits, and runs them; all are here.

    Args:
      logits: see `top_experts`, and there `top_k` and `scoring`. correction: its bias.
      residual: what y is added to, in x's dtype.
      implementation: of `moe_mlp`; experts are chosen by what serves the platform best.
      The others: see `moe_mlp`.

    Returns:
      y `[T, H]` of `moe_mlp`, or its sum with the residual, in x's dtype and rounded to it before
      and after; and the experts and weights of `top_experts`, these in the dtype of the logits.

    Raises:
      ValueError, NotImplementedError: see `moe_mlp`.
    """
    if logits.shape != (x.shape[0], gate_up.shape[0]):
        raise ValueError(
            f"logits must be [{x.shape[0]}, {gate_up.shape[0]}], of each token and expert, "
            f"got {list(logits.shape)}"
        )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"residual must be {x.dtype}{list(x.shape)}, as x is, "
            f"got {residual.dtype}{list(residual.shape)}"
        )
    layer = _Layer(gate_up, gate_up_bias, down, (lora_gate, lora_up), lora_down)
    chosen = jax.ShapeDtypeStruct((x.shape[0], top_k), jnp.int32)
    backend = backend_of(implementation, x, chosen, token_slots, *layer)
    gate, choice = gate or Gate(), _Choice(top_k, scoring)
    apart = functools.partial(_apart, implementation, gate, choice)
    arguments = x, logits, correction, token_slots, valid, residual, layer
    if not 0 < chosen.size <= backend.ROUTED_AT_ONCE:
        return apart(*arguments)
    kernel = functools.partial(_in_one_kernel, backend, gate, choice)
    return kernel_or_parts(kernel, apart, *arguments)


def _apart(
    implementation,
    gate,
    choice,
    x,
    logits,
    correction,
    token_slots,
    valid,
    residual,
    layer: _Layer,
):
    experts, weights = top_experts(logits, correction, *choice)
    weights = rounded(weights, logits.dtype)
    y = moe_mlp(
        x,
        experts,
        weights,
        token_slots,
        layer.gate_up,
        layer.down,
        *layer.into,
        layer.lora_down,
        gate_up_bias=layer.gate_up_bias,
        gate=gate,
        valid=valid,
        implementation=implementation,
    )
    return _with_residual(y, residual), experts, weights


def _with_residual(y, residual):
    return y if residual is None else added(residual, rounded(y, residual.dtype))


def _in_one_kernel(
    backend, gate, choice, x, logits, correction, token_slots, valid, residual, layer: _Layer
):
    """None if the backend has no kernel for it."""
    layer = _Layer(*in_backend_form(backend, tuple(layer)))
    has_slots = any(map(slot_counts, (*layer.into, layer.lora_down)))
    slots = token_slots.astype(jnp.int32) if has_slots else jnp.full(x.shape[0], -1, jnp.int32)
    tokens = slots + 1 if valid is None else jnp.where(valid, slots + 1, -1)
    width = layer.gate_up.shape[1] // 2
    terms = terms_of_parts((width, width), layer.into), terms_of_part(0, layer.lora_down)
    experts_of = layer.gate_up, layer.gate_up_bias, layer.down, *terms, gate
    correction = None if correction is None else jnp.asarray(correction)
    found = backend.routed_experts(x, logits, tokens, correction, choice, *experts_of)
    if found is None:
        return None
    rows, experts, chosen = found
    weights = rounded(chosen, logits.dtype)
    if residual is not None:
        y = backend.add_choices(residual, rows, chosen, logits.dtype)
        if y is not None:
            return y, experts, weights
    position = jnp.asarray(np.arange(experts.size, dtype=np.int32).reshape(experts.shape))
    return _with_residual(combine(rows, position, weights), residual), experts, weights
