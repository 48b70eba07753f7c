"""The TPU kernels read W once and x, y hardly more often, at real models' shapes."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.grouped_lora_matmul import tpu_bytes
from pallas_kernels.grouped_lora_matmul.tpu_bytes import Routing, product_bytes, random_routing
from pallas_kernels.grouped_lora_matmul.tpu_schedule import Device, ProductShape
from pallas_kernels.shapes import DECODE_TOKENS, EXPERT_SHAPES, PREFILL_TOKENS

# Lanes of u that hold nothing, and an x that both cores of a v5p read.
BOUNDS = {DECODE_TOKENS: (1.01, 1.01), PREFILL_TOKENS: (1.10, 1.26)}
# gpt-oss's 2880 columns are not whole lane tiles: factors are padded, a copy, for some products.
PADDED_BOUND = {DECODE_TOKENS: (1.12, 1.12), PREFILL_TOKENS: (1.19, 1.22)}


@pytest.mark.parametrize("device", tpu_bytes.DEVICES)
@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PREFILL_TOKENS])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if "ep8" in n else pytest.mark.slow) for n in EXPERT_SHAPES],
)
def test_named_shapes(name, tokens, device):
    shape = EXPERT_SHAPES[name]
    bounds = PADDED_BOUND if name == "gpt-oss-20b" else BOUNDS
    bound = bounds[tokens][tpu_bytes.DEVICES[device].cores - 1]
    routing = random_routing(shape, tokens, slots=8)
    for operation, moved in tpu_bytes.operations(shape, routing, 16, 8, tpu_bytes.DEVICES[device]):
        assert 1 <= moved.ratio <= bound, operation
        if moved.weights:
            active = np.count_nonzero(routing.group_sizes)
            sides = 1 if operation.startswith("down") else 2
            assert moved.weights == active * sides * shape.hidden * shape.intermediate * 2


def test_by_hand():
    """3 groups of 20, 0 and 30 of 50 rows; slots 0 and 1 in the first, 1 in the last."""
    routing = Routing(
        np.array([20, 0, 30], np.int32), np.repeat([0, 1, 1], [5, 15, 30]).astype(np.int32)
    )
    shape = ProductShape(50, 256, 128, 1, 2, 2, 2, ((16, 0, 128, 2),))
    moved = product_bytes(shape, routing, Device())
    factor, rows = 16 * 128 * 2, 50 * (256 + 128) * 2
    assert moved.weights == 2 * 256 * 128 * 2
    assert moved.rows == rows
    assert moved.low_rank == 3 * factor + 50 * 128 * 2
    assert moved.tables == 3 * 64 * 4
    assert moved.least == moved.weights + rows + 3 * factor + 50 * 16 * 2


def test_rank_classes_by_hand():
    """Slot 0 of rank 16, slot 1 of rank 64: each run fetches the factor of its own class alone."""
    routing = Routing(
        np.array([20, 0, 30], np.int32), np.repeat([0, 1, 1], [5, 15, 30]).astype(np.int32)
    )
    shape = ProductShape(50, 256, 128, 1, 2, 2, 2, ((16, 0, 128, 2), (64, 0, 128, 2)))
    moved = product_bytes(shape, routing, Device(), slots=((0, 1), (1, 1)))
    factors, u = (1 * 16 + 2 * 64) * 128 * 2, 50 * 128 * 2
    assert moved.low_rank == factors + 2 * u  # the rows' u of both: 128 lanes of each
    own = (5 * 16 + 45 * 64) * 2
    assert moved.least == moved.weights + moved.rows + factors + own
