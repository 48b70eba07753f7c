"""The Hopper kernels in the interpreter, with race detection, against the interface's definition.

Wherever the interface lets memory hold anything, or nobody may read it, it holds NaN.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Scoring, implementation, top_experts
from pallas_kernels.grouped_lora_matmul import gpu_rows, gpu_unsorted
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.gpu_schedule import tile_height

if not hasattr(plgpu, "force_gpu_interpret_mode"):
    pytest.skip("the Mosaic GPU interpreter needs jax >= 0.11", allow_module_level=True)

from pallas_kernels.grouped_lora_matmul import gpu_experts, gpu_product, gpu_product_in_place
from pallas_kernels.hopper.arrivals import Made
from tests.pallas_kernels import gpu_interpreter
from tests.pallas_kernels.gpu_interpreter import (
    AheadCase,
    BesideCase,
    InnerCase,
    ProductCase,
    ShrinkCase,
    normal,
)
from tests.pallas_kernels.product_cases import Term
from tests.pallas_kernels.tpu_cases import batches
from tests.pallas_kernels.tpu_interpreter import groups_of_rows

pytestmark = pytest.mark.interpreter

# Every call takes seconds: looking for a smaller failing one would take minutes.
QUICK = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
GPT_OSS = Gate(7.0, 1.702, 1.0)
TALL = ("heights", (112, 128))  # runs of such tiles are added in place
PRODUCTS = {
    "two parts": ProductCase(20, 128, 192, (Term(0, 128, 24), Term(128, 64, 8, shared=True))),
    "gated": ProductCase(20, 64, 256, (Term(0, 128, 16), Term(128, 128, 8)), gate=Gate()),
    "backward": ProductCase(20, 128, 128, (Term(0, 128, 40), Term(0, 128, 8)), contract=1),
    "narrow tiles": ProductCase(19, 256, 96, (Term(0, 64, 16), Term(64, 32, 24)), groups=1),
    "biased, in place, gated": ProductCase(
        20, 64, 256, (Term(0, 128, 8), Term(128, 128, 8)), gate=Gate(), cut=(TALL,), biased=True
    ),
}
SLOW_PRODUCTS = {
    # The last tile's second block of features is past the last.
    "biased": ProductCase(20, 64, 192, (Term(0, 192, 8),), biased=True, layered=True),
    "a layer of several": ProductCase(
        20, 64, 256, (Term(0, 128, 16), Term(128, 128, 8, shared=True)), gate=Gate(), layered=True
    ),
    "in place": ProductCase(20, 64, 192, (Term(0, 128, 8), Term(128, 64, 24)), cut=(TALL,)),
    "in place, gated": ProductCase(
        40, 64, 256, (Term(0, 128, 16), Term(128, 128, 8)), gate=Gate(), cut=(TALL,), layered=True
    ),
    "in place, backward": ProductCase(
        40, 64, 128, (Term(0, 128, 16), Term(0, 128, 8, shared=True)), contract=1, cut=(TALL,)
    ),
    "in place, ranks past one step": ProductCase(
        40, 64, 192, (Term(0, 192, 72),), slots=8, cut=(TALL,), out_dtype="float32"
    ),
    "in place, several tiles": ProductCase(400, 64, 64, (Term(0, 64, 8),), groups=2, slots=6),
    "float32": ProductCase(20, 128, 192, (Term(0, 192, 24),), out_dtype="float32"),
    "biased float32, two blocks": ProductCase(
        40, 64, 320, (Term(0, 320, 8),), out_dtype="float32", cut=(("blocks", 2),), biased=True
    ),
    "biased, gated, without adapters": ProductCase(
        20, 64, 2 * 72, gate=GPT_OSS, biased=True, layered=True
    ),
    "biased, backward": ProductCase(20, 64, 128, (Term(0, 128, 8),), contract=1, biased=True),
    "no adapters": ProductCase(20, 136, 72),
    "float32 without adapters": ProductCase(40, 136, 72, groups=1, out_dtype="float32"),
    "float32 of two parts": ProductCase(
        40, 64, 192, (Term(0, 128, 80), Term(128, 64, 8)), groups=1, out_dtype="float32"
    ),
    "one row": ProductCase(1, 64, 64, (Term(0, 64, 8),), groups=1, slots=1),
    "gpt-oss gate": ProductCase(
        20, 64, 256, (Term(0, 128, 40), Term(128, 128, 40, shared=True)), gate=GPT_OSS
    ),
    "gate of one term": ProductCase(20, 64, 128, (Term(64, 64, 80),), gate=Gate()),
    "ranks past one step": ProductCase(20, 64, 128, (Term(0, 128, 80), Term(64, 64, 16))),
    "several chunks of a tile": ProductCase(40, 64, 128, (Term(0, 128, 16),), groups=1),
    "tiles together": ProductCase(40, 64, 192, (Term(0, 192, 8),), groups=2, slots=2),
    "two blocks, one consumer": ProductCase(
        20, 128, 192, (Term(0, 192, 16),), cut=(("blocks", 2), ("consumers", 1))
    ),
    "three consumers": ProductCase(20, 64, 192, (Term(0, 192, 16),), cut=(("consumers", 3),)),
    "backward of parts": ProductCase(
        24, 192, 64, (Term(0, 64, 80), Term(0, 64, 24, shared=True)), contract=1
    ),
}
SHRINKS = {
    "terms apart": ShrinkCase(20, 192, (8, 24), shared=(False, True)),
    "blocks of rows": ShrinkCase(20, 192, (8, 24), shared=(False, True), as_of=300),
    "a layer of several": ShrinkCase(20, 192, (8, 24), shared=(False, True), layered=True),
}
SLOW_SHRINKS = {
    "columns of their own": ShrinkCase(40, 320, (40, 16), ((0, 128), (128, 192)), as_of=10_000),
    "pieces of runs": ShrinkCase(40, 192, (40, 16), as_of=10_000),
    "some columns": ShrinkCase(20, 320, (80,), ((64, 128),)),
    "few rows, columns of their own": ShrinkCase(
        20, 320, (80, 16, 8), ((64, 128), (0, 64), (192, 128)), stages=4
    ),
    "many ranks": ShrinkCase(20, 128, (80, 80, 8), as_of=100),
    "many ranks apart": ShrinkCase(20, 128, (80, 80, 8)),
    "long runs": ShrinkCase(80, 64, (16,), groups=2, slots=2, as_of=10_000),
    "one row": ShrinkCase(1, 64, (8,), groups=1, slots=1),
}


def assert_close(found, expected):
    """Within the rounding of the result; sums are of float32."""
    tolerance = 1e-5 if found.dtype == np.float32 else 2e-2
    found = np.asarray(found, np.float64)
    limit = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=limit)


def check_product(case: ProductCase, batch, seed=0):
    arguments = case.arguments(*batch, seed)
    found = case.run(*arguments)
    assert found.dtype == case.out_dtype
    assert_close(found, case.expect(*arguments))


@pytest.mark.parametrize("name", PRODUCTS)
@settings(QUICK, max_examples=2)
@given(data=st.data())
def test_product(name, data):
    case = PRODUCTS[name]
    check_product(case, data.draw(batches(case.rows, case.groups, case.slots)))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS | SLOW_PRODUCTS)
@settings(QUICK, max_examples=8)
@given(data=st.data(), seed=st.integers(0, 99))
def test_many_products(name, data, seed):
    case = (PRODUCTS | SLOW_PRODUCTS)[name]
    check_product(case, data.draw(batches(case.rows, case.groups, case.slots)), seed)


# Of two terms, each of a whole low-rank step: added in place only where registers do not move.
WIDE = {
    "gated": ProductCase(
        40, 64, 256, (Term(0, 128, 40), Term(128, 128, 24)), gate=Gate(), cut=(TALL,)
    ),
    "backward": ProductCase(
        40, 64, 128, (Term(0, 128, 24), Term(0, 128, 72, shared=True)), contract=1, cut=(TALL,)
    ),
}


@pytest.mark.parametrize("name", ["gated", pytest.param("backward", marks=pytest.mark.slow)])
@settings(QUICK, max_examples=2)
@given(data=st.data())
def test_product_of_many_ranks_where_registers_stay(name, data):
    case = WIDE[name]
    batch = data.draw(batches(case.rows, case.groups, case.slots))
    with mock.patch.object(implementation, "REGISTERS_MOVE", False):
        check_product(case, batch)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_slot_of_nan_stays_apart_where_registers_stay():
    case = dataclasses.replace(WIDE["gated"], groups=2)
    slots = np.sort(np.resize(np.array([-1, 0, 1, 2], np.int32), 40))
    x, w, *batch, u, factors = case.arguments(np.array([0, 40], np.int32), slots)
    with mock.patch.object(implementation, "REGISTERS_MOVE", False):
        clean = case.run(x, w, *batch, u, factors)
        factors[1][1, 1, 3, 50] = np.nan
        found = case.run(x, w, *batch, u, factors)
    hit = np.zeros(found.shape, bool)
    hit[slots == 1, 50] = True
    assert np.isnan(found[hit].astype(np.float32)).all()
    assert found[~hit].tobytes() == clean[~hit].tobytes()


INNER = {
    "parts": InnerCase(3, 128, 256, (Term(0, 128, 24), Term(192, 64, 8, shared=True))),
    "a dense row": InnerCase(
        1, 128, 192, (Term(0, 128, 24), Term(128, 64, 8)), groups=1, layered=True, equal=True
    ),
    "a dense row in tiles of 48": InnerCase(
        1,
        64,
        3200,
        (Term(0, 2048, 16), Term(2048, 576, 8), Term(2624, 576, 16)),
        groups=1,
        equal=True,
        layered=True,
    ),
    "biased, gated tiles of 48": InnerCase(
        3,
        64,
        256,
        (Term(0, 128, 8), Term(128, 128, 24)),
        gate=GPT_OSS,
        cut=(("width", 48),),
        biased=True,
        layered=True,
    ),
    "heads": InnerCase(3, 128, 128, (Term(0, 128, 24),), groups=3, layered=True, equal=True),
    "a router's rows": InnerCase(
        3, 320, 64, (Term(0, 64, 24),), groups=1, out_dtype="float32", layered=True, equal=True
    ),
}
SLOW_INNER = {
    "gated": InnerCase(
        5, 128, 256, (Term(0, 128, 8), Term(128, 128, 24)), gate=Gate(), layered=True
    ),
    "gated tiles of 48": InnerCase(
        3, 64, 256, (Term(0, 128, 8), Term(128, 128, 24)), gate=Gate(), cut=(("width", 48),)
    ),
    "a narrow tile": InnerCase(1, 576, 320, (Term(0, 64, 40), Term(64, 256, 16)), groups=1),
    "a tile that cannot be narrow": InnerCase(1, 320, 128, (Term(0, 128, 56),), groups=1),
    "a layer of several": InnerCase(5, 64, 64, (Term(0, 64, 16, shared=True),), layered=True),
    "two blocks of features": InnerCase(4, 64, 256, (Term(0, 256, 8),), cut=(("blocks", 2),)),
    "gate of one term": InnerCase(4, 64, 128, (Term(64, 64, 56),), gate=GPT_OSS),
    "float32": InnerCase(4, 64, 128, (Term(64, 64, 56),), out_dtype="float32"),
}


BESIDE = {
    "parts": BesideCase(11, 320, 192, (Term(0, 128, 16), Term(128, 64, 8))),
    "a layer of several": BesideCase(5, 64, 128, (Term(0, 128, 24),), layered=True, block=1),
    "which begins early": BesideCase(
        3, 320, 128, (Term(0, 128, 8),), layered=True, block=2, begins_early=True
    ),
    "gated": BesideCase(3, 128, 256, (Term(0, 128, 8), Term(128, 128, 24)), gate=Gate()),
    "heads": BesideCase(12, 64, 128, (Term(0, 128, 8),), groups=3, block=3),
    "biased heads": BesideCase(12, 64, 128, (Term(0, 128, 8),), groups=3, block=3, biased=True),
}
OTHERS_BESIDE = "parts", "a layer of several", "gated", "heads"


def check_inner(case: InnerCase, data, seed=0):
    groups = [row * case.groups // case.rows for row in range(case.rows)]
    if not case.equal:
        number = st.integers(0, case.groups)
        groups = data.draw(st.lists(number, min_size=case.rows, max_size=case.rows))
    slots = data.draw(
        st.lists(st.integers(-1, case.slots - 1), min_size=case.rows, max_size=case.rows)
    )
    group, slots = np.asarray(groups), np.asarray(slots)
    found, expected = case.check(group, np.where(group < case.groups, slots, -1), seed)
    assert found.dtype == case.out_dtype
    assert_close(found, expected)


@pytest.mark.parametrize("name", INNER)
@settings(QUICK, max_examples=2)
@given(data=st.data())
def test_product_that_makes_u(name, data):
    check_inner(INNER[name], data)


@pytest.mark.slow
@pytest.mark.parametrize("name", INNER | SLOW_INNER)
@settings(QUICK, max_examples=8)
@given(data=st.data(), seed=st.integers(0, 99))
def test_many_products_that_make_u(name, data, seed):
    check_inner((INNER | SLOW_INNER)[name], data, seed)


@pytest.mark.parametrize(
    "more, layered, early",
    [
        (True, True, True),
        pytest.param(True, True, False, marks=pytest.mark.slow),
        pytest.param(False, False, False, marks=pytest.mark.slow),
    ],
)
def test_product_that_norms_its_row(more, layered, early):
    sizes = dict(groups=1, equal=True, layered=layered, biased=True, begins_early=early)
    case = InnerCase(1, 1024, 192, (Term(0, 128, 8), Term(128, 64, 24)), **sizes)
    found, expected = case.check_normed(2, more)
    for its, other in zip(found, expected, strict=True):
        assert_close(its, other)


EXPERTS = {
    "adapters": (True, 48, False),
    "none": (False, 64, False),
    "biased": (True, 48, True),
    "biased, none": (False, 64, True),
}


@pytest.mark.parametrize(
    "name",
    [
        "biased",
        *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS if name != "biased"),
    ],
)
def test_experts_in_one_kernel(name):
    """One program has all tiles: the interpreter knows no waits for others."""
    adapted, width, biased = EXPERTS[name]
    sizes = 5, 320, 256, (Term(0, 128, 8), Term(128, 128, 24)) * adapted
    into = InnerCase(*sizes, gate=Gate(), layered=adapted, biased=biased)
    out = InnerCase(5, 128, 192, (Term(0, 192, 16),) * adapted, layered=adapted)
    group, slots = np.array([2, 0, 4, 1, 2]), np.array([1, -1, -1, 0, 2])
    call, of_out = into.arguments_of(group, slots), out.arguments_of(group, slots, seed=1)
    found = gpu_interpreter.experts(into, out, group, slots, call, of_out, width)
    h = into.of_rows(*call, group, slots).astype(jnp.bfloat16)
    assert_close(found, out.of_rows(h, *of_out[1:], group, slots))


@pytest.mark.parametrize(
    "dtype, corrected, adapted, early",
    [
        pytest.param("bfloat16", False, True, False, marks=pytest.mark.slow),
        pytest.param("float32", True, False, False, marks=pytest.mark.slow),
        ("float32", True, False, True),
    ],
)
def test_experts_that_their_kernel_chooses(dtype, corrected, adapted, early):
    """Of two tokens, one of which is padding: no expert works on it."""
    tokens, top_k, count, scoring = 2, 3, 32, Scoring(scale=1.5)
    rows, terms = tokens * top_k, (Term(0, 128, 8), Term(128, 128, 24)) * adapted
    of_case = dict(groups=count, layered=adapted, begins_early=early)
    into = InnerCase(rows, 320, 256, terms, gate=Gate(), **of_case)
    of_down = (Term(0, 192, 16),) * adapted
    out = InnerCase(rows, 128, 192, of_down, groups=count, layered=adapted)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((tokens, count)).astype(dtype)
    correction = rng.uniform(0, 1, count).astype(np.float32) if corrected else None
    chosen, weights = map(np.asarray, top_experts(logits, correction, top_k, scoring))
    words = np.array([2 * adapted, -1], np.int32)  # slot 1, or none
    valid, slots = np.repeat(words >= 0, top_k), np.repeat(np.maximum(words, 0) - 1, top_k)
    group = np.where(valid, chosen.reshape(-1), count)
    call, of_out = into.arguments_of(group, slots), out.arguments_of(group, slots, seed=1)
    call[0][:] = np.repeat(call[0][::top_k], top_k, axis=0)
    of_tokens = call[0][::top_k], *call[1:]
    by = gpu_experts.Logits(logits, words, correction, top_k, scoring)
    found, *choice = gpu_interpreter.experts(into, out, group, slots, of_tokens, of_out, 48, by)
    h = into.of_rows(*call, group, slots).astype(jnp.bfloat16)
    assert_close(found, out.of_rows(h, *of_out[1:], group, slots))
    np.testing.assert_array_equal(choice[0], chosen)
    np.testing.assert_allclose(choice[1], weights, rtol=2e-6)


TILES = {
    "adapters": ((Term(0, 128, 24), Term(128, 128, 8)), (Term(0, 192, 32),), Gate(), False),
    "shared factors": (
        (Term(0, 128, 40, shared=True), Term(128, 128, 40)), (Term(0, 192, 56),), Gate(), True
    ),
    "none": ((), (), GPT_OSS, True),
}  # fmt: skip


def tiles_cases(name):
    into, out, gate, biased = TILES[name]
    layered = not biased
    into = ProductCase(40, 192, 256, into, gate=gate, biased=biased, layered=layered)
    return into, InnerCase(40, 128, 192, out, groups=4, slots=into.slots, layered=layered)


def check_experts_of_tiles(name, data, seed=0):
    into, out = tiles_cases(name)
    batch = data.draw(batches(into.rows, into.groups, into.slots))
    assert_close(*gpu_interpreter.experts_of_tiles(into, out, batch, seed))


@pytest.mark.parametrize("name", [pytest.param("adapters", marks=pytest.mark.slow), "none"])
def test_words_of_tiles_come_back_to_zero(name, monkeypatch):
    """Each is said and waited for as often as it is made for: the last of all makes it zero."""
    said, waited, made = collections.Counter(), collections.Counter(), {}

    class Counted(Made):
        def __init__(self, words, first, barrier, says, waits):
            super().__init__(words, first, barrier, says, waits)
            made[first] = says, waits

            def count(counter, number):
                counter[first, int(number)] += 1

            self.counts = [functools.partial(count, its) for its in (said, waited)]

        def say(self, number, is_last):
            jax.debug.callback(self.counts[0], number)
            super().say(number, is_last)

        def wait(self, number, is_first):
            jax.debug.callback(self.counts[1], number)
            super().wait(number, is_first)

    monkeypatch.setattr(gpu_experts, "Made", Counted)
    into, out = tiles_cases(name)
    slots = np.random.default_rng(0).integers(-1, into.slots, into.rows)
    sizes = np.array([3, 0, 33, 2])  # and two rows past all
    assert_close(*gpu_interpreter.experts_of_tiles(into, out, (sizes, slots)))
    height = tile_height(into.rows, into.groups)
    tiles = sum(-(-size // height) for size in (*sizes, into.rows - sum(sizes)))
    for first, (says, waits) in made.items():
        words = [(first, number) for number in range(tiles)]
        assert {word: said[word] for word in words} == dict.fromkeys(words, says)
        assert {word: waited[word] for word in words} == dict.fromkeys(words, waits)
    assert len(said) == len(waited) == tiles * len(made)


@settings(QUICK, max_examples=2)
@given(data=st.data())
def test_experts_of_tiles_in_one_kernel(data):
    check_experts_of_tiles("adapters", data)


@pytest.mark.slow
@pytest.mark.parametrize("name", TILES)
@settings(QUICK, max_examples=8)
@given(data=st.data(), seed=st.integers(0, 99))
def test_many_experts_of_tiles(name, data, seed):
    check_experts_of_tiles(name, data, seed)


@pytest.mark.parametrize(
    "name",
    [
        "biased heads",
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS_BESIDE),
    ],
)
@settings(QUICK, max_examples=2)
@given(data=st.data())
def test_product_beside_its_shrink(name, data):
    case = BESIDE[name]
    slots = data.draw(
        st.lists(st.integers(-1, case.slots - 1), min_size=case.rows, max_size=case.rows)
    )
    groups = np.repeat(np.arange(case.groups), case.rows // case.groups)
    found, expected = case.check(groups, np.asarray(slots))
    assert_close(found, expected)


AHEAD = {
    "of two consumers": AheadCase(
        30, 128, 256, (Term(0, 256, 16),), layered=True, cut=(("consumers", 2), ("depth", 1))
    ),
    "gated": AheadCase(26, 320, 256, (Term(0, 128, 8), Term(128, 128, 24)), gate=Gate(), block=1),
    "parts": AheadCase(19, 64, 192, (Term(0, 128, 16), Term(128, 64, 8)), biased=True),
}


@pytest.mark.parametrize(
    "name",
    [
        "of two consumers",
        *(pytest.param(its, marks=pytest.mark.slow) for its in ("gated", "parts")),
    ],
)
@settings(QUICK, max_examples=3)
@given(data=st.data())
def test_product_after_its_shrink(name, data):
    case = AHEAD[name]
    sizes, slots = data.draw(batches(case.rows, case.groups, case.slots))
    group = groups_of_rows(sizes, case.rows)
    group = np.where(group < 0, case.groups, group)
    found, expected = case.check(group, np.where(group < case.groups, slots, -1))
    assert_close(found, expected)


def check_shrink(case: ShrinkCase, batch, seed=0):
    arguments = case.arguments(*batch, seed)
    group_sizes, row_slots = batch
    adapted = (groups_of_rows(group_sizes, case.rows) >= 0) & (row_slots >= 0)
    for u, expected in zip(case.run(*arguments), case.expect(*arguments), strict=True):
        rank = expected.shape[1]
        if adapted.any():
            assert_close(u[adapted, :rank], expected[adapted])
        # A product reads whole rank tiles.
        assert (u[adapted, rank:] == 0).all()


@pytest.mark.parametrize("name", SHRINKS)
@settings(QUICK, max_examples=2)
@given(data=st.data())
def test_shrink(name, data):
    case = SHRINKS[name]
    check_shrink(case, data.draw(batches(case.rows, case.groups, case.slots)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHRINKS | SLOW_SHRINKS)
@settings(QUICK, max_examples=8)
@given(data=st.data(), seed=st.integers(0, 99))
def test_many_shrinks(name, data, seed):
    case = (SHRINKS | SLOW_SHRINKS)[name]
    check_shrink(case, data.draw(batches(case.rows, case.groups, case.slots)), seed)


@dataclasses.dataclass(frozen=True)
class OuterCase:
    """Static sizes; columns are (first, rank) of each term, in an array of 64 or 128, spans are
    (start, width) of each."""

    rows: int
    columns: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]
    dtype: str = "bfloat16"


OUTERS = {
    "two terms": OuterCase(40, ((0, 24), (32, 12)), ((64, 128),) * 2),
    "two spans": OuterCase(40, ((0, 24), (32, 12)), ((64, 300), (400, 40))),
    "float32": OuterCase(40, ((16, 12),), ((0, 40),), dtype="float32"),
}
SLOW_OUTERS = {
    "one term": OuterCase(150, ((0, 8),), ((0, 64),)),
    "terms in reverse, with others around": OuterCase(
        150, ((80, 16), (32, 7), (16, 9)), ((0, 320),) * 3
    ),
    "three spans, of two blocks and of two terms": OuterCase(
        150,
        ((0, 8), (16, 80), (8, 7), (104, 24)),
        ((0, 256), (512, 320), (0, 256), (256, 256)),
    ),
    "a term in two blocks": OuterCase(150, ((0, 40), (64, 40)), ((64, 128),) * 2),
    "four blocks of a consumer": OuterCase(150, ((0, 16),), ((0, 480),)),
    "float32 in two blocks": OuterCase(150, ((16, 100),), ((0, 328),), dtype="float32"),
}


def check_outer(case: OuterCase, begins, ends, seed=0):
    """Runs go to buckets by chance; there are more buckets than some have runs."""
    rng = np.random.default_rng(seed)
    rows, end = case.rows, max(map(sum, case.columns))
    left = normal(rng, rows, -(-end // 64) * 64)
    right = normal(rng, rows, max(map(sum, case.spans)))
    of_a_term = np.zeros(left.shape[1], bool)
    for first, rank in case.columns:
        of_a_term[first : first + rank] = True
    left[:, ~of_a_term] = np.nan
    owned = np.zeros(rows, bool)
    for begin, end in zip(begins, ends, strict=True):
        owned[begin:end] = True
    left[~owned], right[~owned] = np.nan, np.nan
    count = 4
    bucket = np.sort(rng.integers(0, count, len(begins)))
    first, stop = (np.searchsorted(bucket, np.arange(count), side) for side in ("left", "right"))
    runs = gpu_rows.Runs(*(np.asarray(v, np.int32) for v in (first, stop, begins, ends)))
    found = gpu_interpreter.outer(left, case.columns, right, case.spans, runs, case.dtype)
    tolerance = 1e-5 if case.dtype == "float32" else 2**-8
    for sums, (first, rank), span in zip(found, case.columns, case.spans, strict=True):
        start, width = span
        expected = np.zeros((count, rank, width))
        for its, begin, end in zip(bucket, begins, ends, strict=True):
            u = left[begin:end, first : first + rank]
            expected[its] += u.astype(float).T @ right[begin:end, start : start + width].astype(
                float
            )
        assert sums.dtype == case.dtype
        np.testing.assert_allclose(sums.astype(float), expected, rtol=tolerance, atol=1e-4)


@st.composite
def buckets(draw, rows: int, count: int):
    """Where each bucket begins and ends, in order, with rows of nobody between."""
    cuts = draw(st.lists(st.integers(0, rows), min_size=2 * count, max_size=2 * count).map(sorted))
    return np.array(cuts[::2], np.int32), np.array(cuts[1::2], np.int32)


@pytest.mark.parametrize("name", OUTERS)
@settings(QUICK, max_examples=2)
@given(data=st.data())
def test_outer(name, data):
    case = OUTERS[name]
    check_outer(case, *data.draw(buckets(case.rows, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTERS | SLOW_OUTERS)
@settings(QUICK, max_examples=8)
@given(data=st.data(), seed=st.integers(0, 99))
def test_many_outers(name, data, seed):
    case = (OUTERS | SLOW_OUTERS)[name]
    check_outer(case, *data.draw(buckets(case.rows, 3)), seed)


# A row of 2056 columns is 257 lines of 8, more than one copy takes.
@pytest.mark.parametrize(
    "tokens, choices, width", [(20, 3, 256), (7, 1, 2056), (1, 8, 64), (9, 2, 40)]
)
def test_spread(tokens, choices, width):
    rng = np.random.default_rng(0)
    x, position = normal(rng, tokens, width), rng.permutation(tokens * choices).astype(np.int32)
    expected = np.empty((tokens * choices, width), x.dtype)
    expected[position] = np.repeat(x, choices, axis=0)
    found = gpu_interpreter.spread_rows(x, position.reshape(tokens, choices))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", [pytest.param("two parts", marks=pytest.mark.slow), "in place"])
def test_a_slot_of_nan_stays_apart(name):
    """NaN in one slot's factors and u reaches its own rows alone; all others keep their bits."""
    case = (PRODUCTS | SLOW_PRODUCTS)[name]
    slots = np.resize(np.array([0, 1, -1, 1, 2], np.int32), 20)
    x, w, *batch, u, factors = case.arguments(np.array([9, 0, 3, 6], np.int32), slots)
    clean = case.run(x, w, *batch, u, factors)
    for low in u:
        low[slots == 1] = np.nan
    for factor in factors:
        factor[1] = np.nan
    found = case.run(x, w, *batch, u, factors)
    hit = (slots == 1) & (np.arange(20) < 18)
    assert np.isnan(found[hit].astype(np.float32)).all()
    assert found[~hit].tobytes() == clean[~hit].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("gate", [None, GPT_OSS])
def test_with_a_bias_bits_do_not_depend_on_the_schedule(gate):
    """Without adapters, whose sums the interpreter adds in another order."""
    parts = 1 if gate is None else 2
    case = ProductCase(40, 128, parts * 192, gate=gate, groups=3, biased=True)
    arguments = case.arguments(np.array([22, 1, 14], np.int32), np.full(40, -1, np.int32))
    found = [
        dataclasses.replace(case, cut=cut).run(*arguments).tobytes()
        for cut in (
            (),
            (("blocks", 2), ("consumers", 1)),
            (("consumers", 3), ("depth", 4)),
            (TALL,),
        )
    ]
    assert found[1:] == found[:1] * 3


def test_in_place_tiles_without_rows_wait_for_nothing():
    """The table is filled up to whole sets of tiles; row 0 has a slot."""
    case = SLOW_PRODUCTS["in place, several tiles"]
    slots = np.random.default_rng(0).integers(0, 6, 400).astype(np.int32)
    check_product(case, (np.array([146, 158], np.int32), slots))


def test_in_place_runs_of_any_length_have_their_u():
    """Of short ones a few rows are loaded, not past the tile's end; of longer ones all."""
    case = ProductCase(128, 64, 192, (Term(0, 192, 8),), groups=2, cut=(TALL,))
    slots = np.repeat(np.array([0, 1, 2, -1, 0], np.int32), (60, 8, 50, 3, 7))
    check_product(case, (np.array([0, 128], np.int32), slots))


@pytest.fixture
def first_turn(monkeypatch):
    """The only one: sums that are not finite are not made again, run by run."""
    spoiled = gpu_product_in_place.is_spoiled

    def is_spoiled(health, judged):
        spoiled(health, judged)  # who waits is counted
        return jnp.bool(False)

    for module in (gpu_product, gpu_product_in_place):
        monkeypatch.setattr(module, "is_spoiled", is_spoiled)


@pytest.mark.parametrize("rank, runs", [(96, 3), (8, 4), (8, 5)])
def test_in_place_runs_go_on_in_the_next_stage(rank, runs, first_turn):
    """With three steps each, and two in a stage; or as many as a stage has, or one more.

    Then rows without an adapter, for which there is no stage.
    """
    case = ProductCase(128, 64, 192, (Term(0, 192, rank),), groups=2, cut=(TALL,))
    slots = np.append(np.arange(runs) % 3, -1).astype(np.int32)
    slots = np.repeat(slots, [20] * runs + [128 - 20 * runs])
    check_product(case, (np.array([0, 128], np.int32), slots))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_one_number_that_is_not_finite_stays_apart_in_place(value):
    """In one feature of one group's B: nothing else of the tile's other rows tells of it."""
    case = ProductCase(40, 64, 192, (Term(0, 192, 8),), groups=2, cut=(TALL,))
    slots = np.sort(np.resize(np.array([-1, 0, 1, 2], np.int32), 40))
    x, w, *batch, u, factors = case.arguments(np.array([0, 40], np.int32), slots)
    clean = case.run(x, w, *batch, u, factors)
    factors[0][1, 1, 3, 150] = value
    found = case.run(x, w, *batch, u, factors)
    hit = np.zeros(found.shape, bool)
    hit[slots == 1, 150] = True
    assert not np.isfinite(found[hit].astype(np.float32)).any()
    assert found[~hit].tobytes() == clean[~hit].tobytes()


def test_a_slot_of_nan_stays_apart_in_shrink():
    case = ShrinkCase(20, 64, (16,))
    slots = np.resize(np.array([0, 1, -1, 1, 2], np.int32), 20)
    x, *batch, factors, scalings = case.arguments(np.array([9, 0, 3, 6], np.int32), slots)
    (clean,) = case.run(x, *batch, factors, scalings)
    for poisoned in (*factors, *scalings):
        poisoned[1] = np.nan
    x[slots == 1] = np.nan
    (found,) = case.run(x, *batch, factors, scalings)
    kept = (slots != 1) & (slots >= 0) & (np.arange(20) < 18)
    assert found[kept].tobytes() == clean[kept].tobytes()


@pytest.mark.parametrize("waits", [True, False])
def test_races_are_detected(waits):
    """A kernel in which one warpgroup reads what another writes, with and without a barrier."""

    def body(y, shared, written):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _write():
            shared[...] = jnp.ones_like(shared)
            plgpu.barrier_arrive(written)

        @pl.when(warpgroup == 1)
        def _read():
            if waits:
                plgpu.barrier_wait(written)
            y[...] = shared[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=dict(
            shared=plgpu.SMEM((64, 64), jnp.float32), written=plgpu.Barrier(num_arrivals=1)
        ),
    )
    if waits:
        assert (gpu_interpreter.interpret(jax.jit(kernel)) == 1).all()
    else:
        # JAX 0.12 raises its own.
        with pytest.raises((AssertionError, RuntimeError), match="races|RACE"):
            gpu_interpreter.interpret(jax.jit(kernel))


@pytest.mark.parametrize(
    "terms",
    [
        pytest.param((), marks=pytest.mark.slow),
        (Term(0, 128, 16), Term(128, 128, 8)),
    ],
)
def test_rows_that_are_tiles(terms):
    """So few rows that they stay in any order."""
    case = ProductCase(7, 64, 256, terms, gate=Gate(), cut=(("heights", (8,)),))
    sizes, slots = np.array([2, 0, 1, 3], np.int32), np.array([-1, 2, 0, 0, 1, 2, 1], np.int32)
    x, w, _, _, u, factors = arguments = case.arguments(sizes, slots)
    order = np.array([3, 6, 0, 5, 2, 1, 4])
    group = np.where(groups_of_rows(sizes, 7) < 0, case.groups, groups_of_rows(sizes, 7))
    place = jnp.asarray(gpu_rows.place_of(group, slots, case.groups)[order])
    low = case.packed(u)[order] if terms else ()
    tables = gpu_rows.unsorted(place, None)
    found = gpu_interpreter.interpret(case.compiled, tables, x[order], w, low, factors)
    assert_close(found, case.expect(*arguments)[order])


@pytest.mark.parametrize(
    "rows, groups, terms",
    [
        pytest.param(5, 1, (), marks=pytest.mark.slow),
        (161, 1, (Term(0, 128, 16),)),
        pytest.param(70, 3, (), marks=pytest.mark.slow),
        pytest.param(70, 3, (Term(0, 128, 8),), marks=pytest.mark.slow),
    ],
)
def test_equal_groups(rows, groups, terms):
    """Tiles follow from their number, without a table; rows past the groups are zeros."""
    case = ProductCase(rows, 64, 128, terms, groups=groups, biased=groups > 1)
    sizes, slots = np.full(groups, rows // groups), np.arange(rows, dtype=np.int32) // 40 - 1
    x, w, _, _, u, factors = arguments = case.arguments(sizes, slots)
    tables = jax.jit(functools.partial(gpu_rows.tables, None, groups=groups))(slots)
    low = case.packed(u) if terms else ()
    bias = case.bias("bfloat16")
    found = gpu_interpreter.interpret(case.compiled, tables, x, w, low, factors, bias)
    assert_close(found, case.expect(*arguments))


def test_very_few_rows_that_stay_in_order():
    """With tokens that are not valid, and numbers that are not of a group."""
    groups, tokens = 6, 7
    rng = np.random.default_rng(0)
    slot = rng.integers(-1, 3, tokens).astype(np.int32)
    group = rng.integers(-2, groups + 3, (tokens, 2)).astype(np.int32)
    valid = rng.random(tokens) < 0.7
    x = rng.standard_normal((tokens, 384)).astype(jnp.bfloat16)
    lay_out = jax.jit(functools.partial(gpu_unsorted.lay_out, groups=groups))
    arguments = dict(x=x, group=group, token_slots=slot, valid=valid)
    rows, place, arrivals = gpu_interpreter.interpret(functools.partial(lay_out, **arguments))
    np.testing.assert_array_equal(rows, np.repeat(x, 2, axis=0))
    works = (group >= 0) & (group < groups) & valid[:, None]
    of_rows = np.where(works, group, groups).reshape(-1)
    wanted = gpu_rows.place_of(of_rows, np.repeat(slot, 2), groups)
    assert place.tolist() == wanted.tolist()
    assert arrivals.tolist() == [0] * group.size
