"""The activation of gate and up that have biases (gpt-oss), apart from their product.

h[t] = gate's function of (y[t] + bias[group of t]),   y: rows of the product, as it rounds them
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_lora_matmul.gate import (
    Gate,
    gated_columns,
    gated_columns_gradient,
)
from pallas_kernels.layered import is_layered


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def biased_gate(gate: Gate, y, bias, group_of_row):
    """h `[M, I]` of y `[M, 2 I]`, bias `[E, 2 I]`, which may be `Layered`, and int32 `[M]`.

    The sum is rounded to y's dtype before the activation. The bias has no gradient.
    """
    return gated_columns(_biased(y, bias, group_of_row), gate)


def _forward(gate, y, bias, group_of_row):
    return biased_gate(gate, y, bias, group_of_row), (y, bias, group_of_row)


def _backward(gate, saved, dh):
    return gated_columns_gradient(_biased(*saved), dh, gate), None, None


biased_gate.defvjp(_forward, _backward)


def _biased(y, bias, group_of_row):
    # Of a stack in one step: its part is not taken before.
    rows = bias.stack[bias.number, group_of_row] if is_layered(bias) else bias[group_of_row]
    wide = jnp.promote_types(jnp.float32, y.dtype)
    return (y.astype(wide) + rows.astype(wide)).astype(y.dtype)
