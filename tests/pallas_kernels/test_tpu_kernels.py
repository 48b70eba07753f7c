"""The TPU kernels in the interpreter, with race detection, against the interface's definition."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import Lora
from pallas_kernels.grouped_lora_matmul import mosaic_tpu
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.tpu_schedule import ProductSchedule
from tests.pallas_kernels import tpu_interpreter
from tests.pallas_kernels.cases import in_layers
from tests.pallas_kernels.product_cases import Term
from tests.pallas_kernels.tpu_cases import ProductCase, assert_close, batches
from tests.pallas_kernels.tpu_interpreter import groups_of_rows, jitted

pytestmark = pytest.mark.interpreter

GPT_OSS = Gate(7.0, 1.702, 1.0)
PRODUCTS = {
    "two parts": ProductCase(40, 40, 48, (Term(0, 16), Term(16, 32, 6, shared=True))),
    "gated bf16": ProductCase(
        40, 48, 64, (Term(0, 32), Term(32, 32, shared=True)), gate=Gate(), dtype="bfloat16"
    ),
    "backward": ProductCase(40, 40, 36, (Term(0, 36), Term(0, 36, 7)), contract=1),
    "biased": ProductCase(40, 40, 48, (Term(0, 48),), biased=True),
    "biased, gated bf16": ProductCase(
        40, 48, 64, (Term(0, 32), Term(32, 32)), gate=GPT_OSS, dtype="bfloat16", biased=True
    ),
}
SLOW_PRODUCTS = {
    "odd sizes": ProductCase(37, 17, 19, (Term(0, 5), Term(7, 12, 5)), slots=2),
    "gpt-oss gate": ProductCase(40, 33, 36, (Term(0, 18), Term(18, 18)), gate=GPT_OSS),
    "no adapters": ProductCase(40, 40, 48, groups=5),
    "one slot, one group": ProductCase(40, 40, 48, (Term(0, 48),), groups=1, slots=1),
    "part of a half": ProductCase(40, 40, 40, (Term(3, 9), Term(25, 15)), gate=Gate()),
    "backward bf16": ProductCase(40, 40, 48, (Term(0, 48),), contract=1, dtype="bfloat16"),
    "rank 128": ProductCase(24, 40, 48, (Term(0, 48, 128),)),
    "many groups and slots": ProductCase(60, 16, 16, (Term(0, 16),), groups=40, slots=64),
}


def check_product(case: ProductCase, batch, seed=0):
    arguments = case.arguments(*batch, seed)
    found = case.run(*arguments)
    assert found.dtype == arguments[0].dtype
    assert_close(found, case.expect(*arguments), case.dtype)


@pytest.mark.parametrize("name", ["gated bf16", "biased, gated bf16"])
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_product(name, data):
    case = PRODUCTS[name]
    check_product(case, data.draw(batches(case.rows, case.groups, case.slots)))


def test_sums_of_bfloat16_may_stay_float32():
    case = ProductCase(40, 40, 48, (Term(0, 48),), dtype="bfloat16")
    arguments = case.arguments((17, 0, 20), np.arange(40) % 5 - 1)
    product = jitted("product", out_dtype=np.dtype(np.float32), **case.static)
    found = product(*arguments)
    assert found.dtype == np.float32
    assert_close(found, case.expect(*arguments), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS | SLOW_PRODUCTS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_many_products(name, data):
    case = (PRODUCTS | SLOW_PRODUCTS)[name]
    seed = data.draw(st.integers(0, 99))
    check_product(case, data.draw(batches(case.rows, case.groups, case.slots)), seed)


def cut(n_tiles, piece, pieces, ring, *, block_n=None, block_m=32, cores=1):
    """A schedule of low tiles and windows; the shapes decide whether the last pieces are cut."""
    return ProductSchedule(
        block_m=block_m,
        heights=(16, 32) if block_m == 32 else (16,),
        run_heights=(16,),
        n_tiles=n_tiles,
        block_n=block_n or piece * pieces,
        piece=piece,
        pieces=pieces,
        ring=ring,
        run_buffers=2,
        cores=cores,
    )


# Several column tiles, last pieces cut short, rings that wrap inside a group, two cores.
CUT_PRODUCTS = {
    "column tiles": ProductCase(
        90, 30, 896, (Term(0, 384), Term(384, 512)), schedule=cut(7, 128, 1, 2)
    ),
    "pieces, two cores": ProductCase(
        90,
        30,
        992,
        (Term(0, 992), Term(512, 480, shared=True)),
        schedule=cut(2, 128, 4, 5, cores=2),
    ),
    "padded factors": ProductCase(
        90, 30, 992, (Term(0, 300), Term(300, 340)), schedule=cut(2, 256, 2, 3, block_m=64)
    ),
    "gated column tiles": ProductCase(
        90,
        30,
        2 * 480,
        (Term(0, 480), Term(480, 480)),
        gate=Gate(),
        schedule=cut(2, 128, 2, 3, cores=2),
        biased=True,
    ),
    "backward pieces": ProductCase(
        90,
        1344,
        384,
        (Term(0, 384), Term(0, 384)),
        contract=1,
        schedule=cut(2, 512, 3, 4, block_n=256, cores=2),
    ),
    "backward odd columns": ProductCase(
        90, 1344, 150, (Term(0, 150),), contract=1, schedule=cut(1, 512, 3, 5, block_n=150)
    ),
}
QUICK_CUTS = ("pieces, two cores", "backward pieces")
SLOW_SIZES = ((0, 0, 90), (1, 88, 1))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK_CUTS else pytest.mark.slow)
        for name in CUT_PRODUCTS
    ],
)
@pytest.mark.parametrize(
    "sizes",
    [(40, 0, 43), (0, 0, 0), *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW_SIZES)],
    ids=str,
)
def test_cut_product(name, sizes):
    case = CUT_PRODUCTS[name]
    slots = np.sort(np.random.default_rng(0).integers(-1, case.slots, case.rows))
    arguments = case.arguments(sizes, slots)
    assert_close(case.run(*arguments), case.expect(*arguments), case.dtype)


def shrink_arguments(group_sizes, row_slots, dtype="float32", seed=0):
    """x with two parts; the second's factor and scaling are shared by all groups."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((40, 24 + 130))
    x[groups_of_rows(group_sizes, 40) < 0] = np.nan
    factors = rng.standard_normal((4, 3, 4, 24)), rng.standard_normal((4, 1, 6, 130))
    scaling = rng.uniform(0.5, 2, (4, 3)).astype(np.float32)
    return (
        x.astype(dtype),
        np.asarray(group_sizes, np.int32),
        np.asarray(row_slots, np.int32),
        tuple(factor.astype(dtype) for factor in factors),
        (scaling, scaling[:, :1]),
    )


@settings(max_examples=5, deadline=None)
@given(batches(40, 3, 4))
def test_shrink(batch):
    arguments = shrink_arguments(*batch)
    x, sizes, slots, factors, scalings = arguments
    static = dict(starts=(0, 24), firsts=(0, 0))
    found = jitted("shrink", **static)(x, sizes, slots, factors, scalings=scalings)
    expected = tpu_interpreter.shrink(x, sizes, slots, factors, scalings=scalings, **static)
    adapted = (batch[1] >= 0) & (groups_of_rows(batch[0], 40) >= 0)
    for u, exact in zip(found, expected, strict=True):
        assert_close(u[adapted], exact[adapted], "float32")


@pytest.mark.parametrize(
    "groups, start, width",
    [
        pytest.param(3, 128, 128, id="columns in place"),
        pytest.param(3, 9, 25, id="columns cut out", marks=pytest.mark.slow),
        pytest.param(1, 0, 300, id="all groups", marks=pytest.mark.slow),
    ],
)
@settings(max_examples=5, deadline=None)
@given(batch=batches(40, 3, 4))
def test_outer(groups, start, width, batch):
    rng = np.random.default_rng(0)
    left = rng.standard_normal((40, 7)).astype(np.float32)
    right = rng.standard_normal((40, 300)).astype(np.float32)
    absent = (groups_of_rows(batch[0], 40) < 0) | (batch[1] < 0)
    left[absent], right[absent], left[:, 5:] = np.nan, np.inf, np.nan
    static = dict(start=start, width=width, first=0, shape=(4, groups))
    outer = jitted("outer", ranks=(2, 3), dtype="float32", **static)
    found = outer((left[:, :2], left[:, 2:]), right, *batch)
    for sums, u in zip(found, (left[:, :2], left[:, 2:5]), strict=True):
        assert sums.dtype == np.float32
        assert_close(sums, tpu_interpreter.outer(u, right, *batch, **static), "float32")


LAYERED = {
    "gated bf16": PRODUCTS["gated bf16"],
    "biased": PRODUCTS["biased"],
    "padded factors, backward": ProductCase(
        40, 200, 300, (Term(7, 200),), contract=1, schedule=cut(1, 200, 1, 2, block_n=300)
    ),
    "column tiles": dataclasses.replace(CUT_PRODUCTS["gated column tiles"], rows=40),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "biased" else pytest.mark.slow) for n in LAYERED]
)
def test_product_of_one_layer(name):
    case = LAYERED[name]
    x, w, *rows, u, factors = case.arguments((17, 0, 20), np.arange(40) % 5 - 1)
    found = case.run(x, in_layers(w), *rows, u, in_layers(factors), of_layer=in_layers)
    np.testing.assert_array_equal(found, case.run(x, w, *rows, u, factors))


def test_shrink_of_one_layer():
    *rows, factors, scalings = shrink_arguments((17, 0, 20), np.arange(40) % 5 - 1)
    shrink = jitted("shrink", starts=(0, 24), firsts=(0, 0))
    found = shrink(*rows, in_layers(factors), scalings=in_layers(scalings))
    wanted = shrink(*rows, factors, scalings=scalings)
    adapted = (rows[2] >= 0) & (groups_of_rows(rows[1], 40) >= 0)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one[adapted], other[adapted])


def test_no_rows():
    case = dataclasses.replace(PRODUCTS["two parts"], rows=0)
    arguments = case.arguments((0, 0, 0), np.zeros(0, np.int32))
    assert case.run(*arguments).shape == (0, 48)
    x, _, sizes, slots, u, factors = arguments
    shrink = jitted("shrink", starts=(0,), scalings=(None,), firsts=(0,))
    (low,) = shrink(x, sizes, slots, factors[:1])
    assert low.shape == (0, 4)
    shape = dict(start=0, width=40, first=0, shape=(4, 3))
    outer = jitted("outer", ranks=(4,), dtype="float32", **shape)
    (sums,) = outer(u[:1], x, sizes, slots)
    assert sums.shape == (4, 3, 4, 40) and not sums.any()


@pytest.mark.slow
def test_equal_groups():
    case = dataclasses.replace(PRODUCTS["two parts"], groups=4)
    arguments = case.arguments((10, 10, 10, 10), np.arange(40) % 5 - 1)
    expected = case.expect(*arguments)
    found = case.run(*arguments[:2], None, *arguments[3:])
    assert_close(found, expected, "float32")


class TestCheck:
    def pair(self, dtype=np.float32, rank=4):
        return Lora(
            np.zeros((2, 1, rank, 16), dtype),
            np.zeros((2, 1, rank, 8), dtype),
            np.zeros((2, 1), np.float32),
        )

    def test_what_is_served(self):
        x, w = np.zeros((5, 16), np.float32), np.zeros((1, 8, 16), np.float32)
        assert mosaic_tpu.check(x, w, (self.pair(),), (8,)) is None

    @pytest.mark.parametrize("dtype", [np.float16, np.int32])
    def test_dtypes(self, dtype):
        x, w = np.zeros((5, 16), dtype), np.zeros((1, 8, 16), np.float32)
        with pytest.raises(NotImplementedError, match=r"\[5, 16\].*\[1, 8, 16\]"):
            mosaic_tpu.check(x, w, (self.pair(),), (8,))

    @pytest.mark.parametrize(
        "slots, groups, rank, why",
        [(1024, 256, 1, "SMEM"), (1024, 1, 40, "VMEM")],
        ids=["scalings", "gradients of A of two parts"],
    )
    def test_slots(self, slots, groups, rank, why):
        def zeros(*shape, dtype=np.float32):
            return np.broadcast_to(dtype(0), shape)

        pair = Lora(
            zeros(slots, groups, rank, 16), zeros(slots, groups, rank, 8), zeros(slots, groups)
        )
        x, w = zeros(5, 16), zeros(groups, 16, 16)
        assert (
            mosaic_tpu.check(x, w[:, :8], (pair._replace(scaling=zeros(slots, 1)),), (8,)) is None
        )
        with pytest.raises(NotImplementedError, match=why):
            mosaic_tpu.check(x, w, (pair, pair), (8, 8))

    def test_float32_sums_take_more_memory(self):
        """Of an x so wide that it fits in VMEM in bfloat16 alone."""
        x = np.broadcast_to(jnp.bfloat16(0), (4096, 400_000))
        w = np.broadcast_to(jnp.bfloat16(0), (1, 16, 400_000))
        assert mosaic_tpu.check(x, w, (None,), (16,)) is None
        with pytest.raises(NotImplementedError, match="VMEM"):
            mosaic_tpu.check(x, w, (None,), (16,), np.dtype(np.float32))

    def test_sizes(self):
        x = np.broadcast_to(np.float32(0), (5, 65_537))
        w = np.broadcast_to(np.float32(0), (1, 65_537, 65_537))
        with pytest.raises(NotImplementedError, match="VMEM"):
            mosaic_tpu.check(x, w, (None,), (65_537,))
