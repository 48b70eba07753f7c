"""The public operation and its gradients on the TPU kernels, against the plain-JAX backend."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import grouped_lora_matmul
from pallas_kernels.grouped_lora_matmul.gate import Gate
from tests.pallas_kernels.cases import Part, Shape, make_case
from tests.pallas_kernels.tpu_cases import assert_close
from tests.pallas_kernels.tpu_interpreter import interpreter

pytestmark = pytest.mark.interpreter

GATED = Shape(24, 3, 17, (Part(16), Part(16, shared_a=True, shared_scaling=True)), rank=3)
PARTS = Shape(24, 3, 17, (Part(12), Part(9, adapted=False), Part(5, shared_b=True)), rank=3)


def run(case, dy, implementation, gate):
    """y, dx and the gradients of every part."""

    @jax.jit
    def gradients(x, lora, dy):
        call = functools.partial(grouped_lora_matmul, gate=gate, implementation=implementation)
        widths = tuple(SHAPE_OF_GATE[gate].widths)
        y, pullback = jax.vjp(
            lambda x, lora: call(x, case.w, case.group_sizes, case.row_slots, lora, parts=widths),
            x,
            lora,
        )
        return y, *pullback(dy)

    return jax.tree.map(np.asarray, gradients(case.x, case.lora, dy))


SHAPE_OF_GATE = {Gate(): GATED, None: PARTS}


@pytest.mark.slow
@pytest.mark.parametrize("gate", SHAPE_OF_GATE, ids=["gated", "parts"])
def test_gradients(gate):
    shape = SHAPE_OF_GATE[gate]
    slots = np.random.default_rng(0).integers(-1, 4, 24)
    case = make_case(shape, (10, 0, 11), slots)  # the last 3 rows are in no group
    width = sum(shape.widths) // (1 if gate is None else 2)
    dy = np.random.default_rng(1).standard_normal((24, width)).astype(np.float32)
    with interpreter():
        found = run(case, dy, "mosaic_tpu", gate)
    expected = run(case, dy, "xla", gate)
    for value, exact in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert value.shape == exact.shape and value.dtype == exact.dtype
        assert_close(value, exact, "float32")
