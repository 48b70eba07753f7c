"""Gate, up and down of a layer's rows: two products, or one kernel where the backend has one."""

from __future__ import annotations

import functools
from types import ModuleType

from pallas_kernels.grouped_lora_matmul import differentiable
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.lora import terms_of_part, terms_of_parts
from pallas_kernels.moe_mlp.down import weighted_down
from pallas_kernels.one_kernel import kernel_or_parts
from pallas_kernels.routing_plan.api import combine


def experts(backend: ModuleType, parts, gate: Gate, x, gate_up, bias, down, route, lora, *rest):
    """The weighted sums of what the experts make of each token.

    Args:
      parts: the columns of gate and of up. x: [M, H], rows of the route.
      gate_up: [E, 2 I, H]. bias: of it, [E, 2 I], or None. down: [E, H, I].
      lora: adapters of gate and up, and of down.
      rest: `known_u` of `differentiable.grouped_lora_matmul`, then weights and slots of
        `weighted_down`.

    Returns:
      [T, H] in float32 (or float64).
    """
    apart = functools.partial(_apart, backend, parts, gate)
    arguments = x, gate_up, bias, down, route, lora, *rest
    if not 0 < x.shape[0] <= backend.EXPERTS_AT_ONCE:
        return apart(*arguments)
    return kernel_or_parts(functools.partial(_at_once, backend, parts, gate), apart, *arguments)


def _apart(backend, parts, gate, x, gate_up, bias, down, route, lora, known_u, weights, slots):
    into, out = lora
    arrays = x, gate_up, bias, route.tables, into, known_u
    hidden = differentiable.grouped_lora_matmul(backend, parts, gate, None, *arrays)
    return weighted_down(backend, hidden, down, route, out, weights, slots)


def _at_once(backend, parts, gate, x, gate_up, bias, down, route, lora, known_u, weights, slots):
    """In one kernel; None if the backend does not take them."""
    del slots
    if known_u is not None:
        return None
    into, out = terms_of_parts(parts, lora[0]), terms_of_part(0, lora[1])
    rows = backend.experts(x, gate_up, bias, down, route.tables, into, out, gate)
    return None if rows is None else combine(rows, route.position, weights)
