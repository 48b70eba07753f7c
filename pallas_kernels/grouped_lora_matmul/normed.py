"""`normed_lora_matmul`: a norm, and the dense product that follows it.

The definition is that of its parts, `rms_norm` or `add_norm` and `lora_matmul`; of one row a
backend may have one kernel for both, with the same bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_lora_matmul.api import checked, in_backend_form, lora_matmul
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.lora import Slots, terms_of_parts
from pallas_kernels.one_kernel import kernel_or_parts
from pallas_kernels.row_reduce.api import add_norm, rms_norm


class _Static(NamedTuple):
    """What is no array; as in `lora_matmul`, and the norm's eps."""

    eps: float
    parts: tuple[int, ...]
    gate: Gate | None
    out_dtype: np.dtype | None
    implementation: str | None


def normed_lora_matmul(
    x: Float[Array, "rows k"],
    more: Float[Array, "rows k"] | None,
    norm_weight: Float[Array, " k"],
    eps: float,
    w: Float[Array, "n k"],
    row_slots: Int[Array, " rows"],
    lora: tuple[Slots | None, ...] = (),
    *,
    parts: tuple[int, ...] | None = None,
    bias: Float[Array, " n"] | None = None,
    gate: Gate | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows k"], Float[Array, "rows k"], Float[Array, "rows n"]]:
    """Norms rows, or their sum with more, and multiplies them.

    Args:
      x, more, norm_weight, eps: see `rms_norm` and, if there is more, `add_norm`.
      implementation: of the product; rows are normed by what serves the platform best.
      The others: see `lora_matmul`.

    Returns:
      x, or its sum with more; it normed; and the product of that.

    Raises:
      ValueError, NotImplementedError: see `lora_matmul`.
    """
    grouped = w.reshape(1, *w.shape), None, row_slots, lora, parts
    of_groups = None if bias is None else bias.reshape(1, *bias.shape)
    call = x, *grouped, of_groups, gate, out_dtype, implementation
    backend, parts, lora, out_dtype = checked(*call)
    static = _Static(eps, parts, gate, out_dtype, implementation)
    apart = functools.partial(_apart, static)
    arguments = x, more, norm_weight, w, row_slots, lora, bias
    if not 0 < x.shape[0] <= backend.NORMED_ROWS:
        return apart(*arguments)
    return kernel_or_parts(functools.partial(_in_one_kernel, backend, static), apart, *arguments)


def _apart(static: _Static, x, more, weight, w, row_slots, lora, bias):
    if more is None:
        total, normed = x, rms_norm(x, weight, static.eps)
    else:
        total, normed = add_norm(x, more, weight, static.eps)
    options = static._asdict()
    del options["eps"]
    return total, normed, lora_matmul(normed, w, row_slots, lora, bias=bias, **options)


def _in_one_kernel(backend, static: _Static, x, more, weight, w, row_slots, lora, bias):
    """None if the backend has no kernel for it."""
    w, bias, lora = in_backend_form(backend, (w.reshape(1, *w.shape), bias, lora))
    weight = weight.astype(x.dtype)
    terms = terms_of_parts(static.parts, lora)
    tables = backend.tables(None, jnp.asarray(row_slots), 1)
    found = backend.normed_product(
        x,
        more,
        weight,
        static.eps,
        w,
        tables,
        terms,
        gate=static.gate,
        out_dtype=static.out_dtype,
        bias=None if bias is None else bias.reshape(1, *bias.shape),
    )
    if found is None:
        return None
    y, *sums, normed = found
    return *(sums or [x]), normed, y
