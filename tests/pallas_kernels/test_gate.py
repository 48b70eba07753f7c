"""The gated activations: their bits depend on the row alone, whatever the compiler fuses."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.grouped_lora_matmul.gate import Gate, gated_columns, gated_columns_gradient

ROWS = 67
FORMS = {"silu": Gate(), "gpt-oss": Gate(limit=7.0, alpha=1.702, up_offset=1.0)}


@functools.cache
def compiled(form):
    @jax.jit
    def both(y, dhidden):
        return gated_columns(y, form), gated_columns_gradient(y, dhidden, form)

    return both


def arguments(width):
    rng = np.random.default_rng(width)
    shapes = (ROWS, 2 * width), (ROWS, width)
    return tuple(3 * rng.standard_normal(shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("width", [4, 8])
def test_the_number_of_rows_does_not_matter(width, form):
    whole = compiled(form)(*arguments(width))
    for count in (1, 7, 15, 31):
        some = compiled(form)(*(its[:count] for its in arguments(width)))
        for its, expected in zip(some, whole, strict=True):
            np.testing.assert_array_equal(its, expected[:count])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_gradient_far_from_zero(form):
    """Where exp overflows nothing is left of a sigmoid, nor of its slope."""
    gate = np.array([-1e4, -200, -100, -88.8, -53, -20, -3, 0, 2, 6.9, 50, 200], np.float32)
    y = np.stack([gate, np.full_like(gate, 0.7)], axis=1)
    found = np.asarray(gated_columns_gradient(y, np.full((len(gate), 1), 1.5, np.float32), form))
    gate, up = y.astype(np.float64).T
    inside = np.ones_like(gate, bool) if form.limit is None else gate < form.limit
    gate = gate if form.limit is None else np.minimum(gate, form.limit)
    sigmoid = np.exp(-np.logaddexp(0, -form.alpha * gate))
    slope = sigmoid * (1 + form.alpha * gate * (1 - sigmoid))
    expected = 1.5 * np.stack([inside * (up + form.up_offset) * slope, gate * sigmoid], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_equals_the_definition(form):
    y, _ = arguments(8)
    gate, up = np.split(y.astype(np.float64), 2, axis=1)
    if form.limit is not None:
        gate, up = np.minimum(gate, form.limit), np.clip(up, -form.limit, form.limit)
    expected = gate / (1 + np.exp(-form.alpha * gate)) * (up + form.up_offset)
    np.testing.assert_allclose(gated_columns(y, form), expected, rtol=1e-5, atol=1e-6)
