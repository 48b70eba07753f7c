"""The gated activations of expert MLPs, as the epilogue of the gate/up product."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.apart import apart


class Gate(NamedTuple):
    """silu(gate) · up by default; gpt-oss is `Gate(limit=7.0, alpha=1.702, up_offset=1.0)`.

    Attributes:
      limit: gate is cut to at most this, up to ±this. None: no limits.
      alpha: gate · sigmoid(alpha · gate).
      up_offset: added to up.
    """

    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0


def gated(gate: jax.Array, up: jax.Array, form: Gate, exp=jnp.exp) -> jax.Array:
    """The activation of float32 gate and up, of any equal shape."""
    gate, up = _limited(gate, up, form)
    scaled = gate if form.alpha == 1.0 else form.alpha * gate
    shifted = up if form.up_offset == 0.0 else up + form.up_offset
    return gate / (1.0 + exp(-scaled)) * shifted


def gated_columns(y: jax.Array, form: Gate) -> jax.Array:
    """The activation of `[gate | up]`, computed in float32 (or float64), in y's dtype."""
    gate, up = apart(jnp.split(_rounded(y), 2, axis=1))
    return gated(gate, up, form, _exp).astype(y.dtype)


def gated_columns_gradient(y: jax.Array, dhidden: jax.Array, form: Gate) -> jax.Array:
    """The gradient of `[gate | up]`, from that of the activation."""
    # Or the compiler keeps float32 values of the forward pass for this, which take longer to read.
    gate, up = apart(jnp.split(_wide(lax.optimization_barrier(y)), 2, axis=1))
    (gate, up), pullback = jax.vjp(lambda gate, up: _limited(gate, up, form), gate, up)
    scaled, dhidden = form.alpha * gate, dhidden.astype(gate.dtype)
    # Not by way of exp's own derivative: far below zero that is infinite, times zero.
    sigmoid = 1.0 / (1.0 + _exp(-scaled))
    slope = sigmoid * (1.0 + apart(scaled * (1.0 - sigmoid)))
    shifted = up if form.up_offset == 0.0 else up + form.up_offset
    gradients = pullback((dhidden * shifted * slope, dhidden * (gate * sigmoid)))
    return jnp.concatenate(gradients, axis=1).astype(y.dtype)


def _limited(gate, up, form: Gate):
    if form.limit is None:
        return gate, up
    return jnp.minimum(gate, form.limit), jnp.clip(up, -form.limit, form.limit)


def _exp(x):
    """Apart from what makes its argument, and from what takes it."""
    return apart(jnp.exp(apart(x)))


def _rounded(y):
    """`_wide`, with the rounding to y's dtype that the compiler may leave out inside a fusion."""
    if y.dtype == jnp.bfloat16:
        # The same bits, then zeros: an instruction, where reducing the precision again takes eight.
        bits = lax.bitcast_convert_type(y, jnp.uint16).astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    number = jnp.finfo(y.dtype)
    return lax.reduce_precision(_wide(y), number.nexp, number.nmant)


def _wide(y):
    return y.astype(jnp.promote_types(jnp.float32, y.dtype))
