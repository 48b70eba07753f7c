"""The Hopper kernel that adds up the choices of a token, in the interpreter: bits, and races."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rounded import added, rounded
from pallas_kernels.routing_plan.api import combine

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need jax >= 0.11", allow_module_level=True)

from pallas_kernels.routing_plan.gpu_combine import COLUMNS, add_choices


@jax.jit
def parts(residual, rows, weights):
    """The definition."""
    position = jnp.arange(weights.size).reshape(weights.shape)
    return added(residual, rounded(combine(rows, position, weights), residual.dtype))


def run(dtype, *arguments):
    """What the kernel gives; it is interpreted where it cannot run."""
    from tests.pallas_kernels.gpu_interpreter import interpret

    kernel = jax.jit(functools.partial(add_choices, dtype=dtype))
    if jax.default_backend() == "gpu":
        return np.asarray(kernel(*arguments))
    return np.asarray(interpret(kernel, *arguments))


@pytest.mark.interpreter
@pytest.mark.parametrize("tokens, choices, parts_of_row", [(2, 3, 2), (1, 8, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_its_parts(tokens, choices, parts_of_row, dtype):
    rng = np.random.default_rng(0)
    hidden = COLUMNS * parts_of_row
    residual, rows = (
        rng.standard_normal((count, hidden)).astype(jnp.bfloat16)
        for count in (tokens, tokens * choices)
    )
    weights = rng.uniform(0, 1, (tokens, choices)).astype(np.float32)
    expected = np.asarray(parts(residual, rows, weights.astype(dtype)))
    np.testing.assert_array_equal(run(dtype, residual, rows, weights), expected)


def test_other_widths_have_no_kernel():
    residual, rows = (np.zeros((count, COLUMNS + 128), jnp.bfloat16) for count in (1, 4))
    assert add_choices(residual, rows, np.ones((1, 4), np.float32), np.float32) is None
