"""Schedules fit in memory and keep the rules of the copy engine, for any shapes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul import tpu_schedule as ts
from pallas_kernels.grouped_lora_matmul.tpu_bytes import DEVICES, named_products
from pallas_kernels.grouped_lora_matmul.tpu_schedule import Device, ProductShape

SIZES = st.one_of(st.integers(1, 9000), st.integers(1, 60).map(lambda blocks: 128 * blocks))


@st.composite
def product_shapes(draw):
    n, halves = draw(SIZES), draw(st.sampled_from([1, 2]))
    rank, start = draw(st.integers(1, 128)), draw(st.integers(0, n - 1))
    item = draw(st.sampled_from([2, 4]))
    return ProductShape(
        rows=draw(st.integers(1, 40_000)),
        k=draw(SIZES),
        n=n,
        halves=halves,
        contract=draw(st.sampled_from([2, 1])) if halves == 1 else 2,
        x_bytes=item,
        w_bytes=item,
        terms=draw(st.sampled_from([(), ((rank, start, n - start, item),)])),
    )


def check(shape: ProductShape, device: Device):
    s = ts.product_schedule(shape, device)
    sublanes = 32 // shape.w_bytes
    assert ts.product_vmem(shape, s) <= device.budget < device.limit < device.vmem
    assert s.n_tiles % s.cores == 0 and s.cores in (1, device.cores)
    assert (s.n_tiles - 1) * s.block_n < shape.n <= s.n_tiles * s.block_n
    assert s.n_tiles == 1 or s.block_n % ts.LANES == 0
    assert s.pieces < s.ring <= 2 * s.pieces
    cut = shape.n if shape.contract == 2 else shape.k
    pieces = s.pieces * (s.n_tiles if shape.contract == 2 else 1)
    assert (pieces - 1) * s.piece < cut <= pieces * s.piece
    assert pieces == 1 or (s.piece % ts.ROW_ALIGN == 0 and cut % sublanes == 0)
    assert -(-shape.rows // s.block_m) * ts.TASK_BYTES <= ts.SMEM // 2
    # The steps of the sum over K do not depend on the schedule.
    assert shape.contract == 2 or s.piece in (ts.PIECE, shape.k)
    for heights in (s.heights, s.run_heights):
        assert list(heights) == sorted(heights)
        assert all(s.block_m % height == 0 and height % ts.ROW_ALIGN == 0 for height in heights)
    return s


@settings(max_examples=200, deadline=None)
@given(product_shapes(), st.sampled_from(list(DEVICES.values())))
def test_any_product(shape, device):
    try:
        check(shape, device)
    except NotImplementedError as error:
        assert "VMEM" in str(error)  # an odd axis stays whole, so very large odd ones do not fit
        odd = shape.n % ts.LANES or shape.k % 16
        assert odd or shape.k * shape.w_bytes > 40_000


@pytest.mark.parametrize("device", DEVICES)
def test_named_products(device):
    for name, shape in named_products():
        s = check(shape, DEVICES[device])
        assert s.n_tiles <= 2, name  # x is read at most twice
        if s.n_tiles % 2 == 0:
            assert s.cores == DEVICES[device].cores, name
        # Prefill keeps the MXU busy, and groups seldom straddle tiles.
        assert s.block_m >= min(256, ts.tile_rows(shape.rows)), name


@settings(max_examples=100, deadline=None)
@given(product_shapes(), st.sampled_from(list(DEVICES.values())), st.integers(1, 40_000))
def test_the_steps_of_a_sum_do_not_depend_on_the_rows(shape, device, rows):
    """Nor does anything else that a row's bits could depend on, when contract is 1."""
    try:
        pieces = {
            ts.product_schedule(shape._replace(rows=r), device).piece for r in (rows, shape.rows)
        }
    except NotImplementedError:
        return
    assert shape.contract == 2 or len(pieces) == 1


def test_what_does_not_fit_is_refused():
    shape = ProductShape(64, 65_537, 65_537, 1, 2, 4, 4)
    with pytest.raises(NotImplementedError, match="65537"):
        ts.product_schedule(shape, Device())
    with pytest.raises(NotImplementedError):
        ts.shrink_schedule(8, (10**7,), 4, ((128, 10**7, 4),), Device())
    with pytest.raises(NotImplementedError):
        ts.outer_schedule(8, 10**5, 128, 128, 4, 4, Device())
    with pytest.raises(NotImplementedError, match="SMEM"):
        ts.product_schedule(ProductShape(10**8, 128, 128, 1, 2, 4, 4), Device())
    with pytest.raises(NotImplementedError, match="SMEM"):
        ts.outer_schedule(10**8, 4, 16, 128, 4, 4, Device())


@pytest.mark.parametrize("rows, expected", [(1, 16), (16, 16), (17, 32), (500, 512), (9999, 512)])
def test_tile_rows(rows, expected):
    assert ts.tile_rows(rows) == expected
