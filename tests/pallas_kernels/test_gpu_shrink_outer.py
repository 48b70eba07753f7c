"""The shrink of dy and the sums for dB in one kernel: its units, in the interpreter, on a GPU."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul import gpu_rows, mosaic_gpu
from pallas_kernels.grouped_lora_matmul import gpu_shrink_outer_units as units
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Columns
from tests.pallas_kernels import gpu_interpreter
from tests.pallas_kernels.gpu_interpreter import normal

QUICK = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@dataclasses.dataclass(frozen=True)
class Case:
    """Static sizes: columns are (first, rank) of each term in an array of 64, spans are (start,
    width); a unit has V of so many rows where its bucket has no others, and of 64 else."""

    rows: int
    columns: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]
    tile: int = 16
    chunk: int = 128
    slots: int = 2
    groups: int = 2
    scaling_groups: int = 1

    @property
    def buckets(self) -> int:
        return self.slots * self.groups


CASES = {
    "one term": Case(140, ((16, 16),), ((64, 300),), scaling_groups=2),
    "two terms": Case(90, ((0, 12), (16, 9)), ((0, 320), (320, 64)), chunk=64),
    "wider ranks": Case(100, ((32, 32),), ((0, 64),), tile=32),
}
SLOW_CASES = {
    "long runs": Case(700, ((0, 16),), ((0, 600),), slots=1),
    "three terms": Case(300, ((32, 8), (0, 24), (24, 7)), ((300, 40), (0, 300), (384, 256)), 32),
}


def check(case: Case, buckets, begins, ends, seed: int):
    """Runs are of these buckets, which are sorted."""
    rng = np.random.default_rng(seed)
    left, right = normal(rng, case.rows, 64), normal(rng, case.rows, max(map(sum, case.spans)))
    of_a_term, owned = np.zeros(64, bool), np.zeros(case.rows, bool)
    for first, rank in case.columns:
        of_a_term[first : first + rank] = True
    for begin, end in zip(begins, ends, strict=True):
        owned[begin:end] = True
    left[:, ~of_a_term] = np.nan
    left[~owned], right[~owned] = np.nan, np.nan
    shapes = [
        (case.slots, case.groups, rank, width)
        for (_, rank), (_, width) in zip(case.columns, case.spans, strict=True)
    ]
    factors = tuple(normal(rng, *shape) for shape in shapes)
    scalings = tuple(
        rng.standard_normal((case.slots, case.scaling_groups)).astype(np.float32) for _ in shapes
    )
    number = np.arange(case.buckets)
    first, stop = (np.searchsorted(buckets, number, side) for side in ("left", "right"))
    runs = gpu_rows.Runs(*(np.asarray(its, np.int32) for its in (first, stop, begins, ends)))
    arrays = left, case.columns, right, case.spans, runs, factors, scalings
    v, sums = gpu_interpreter.shrink_outer(*arrays, case.tile, case.chunk)
    for term, ((column, rank), (start, width)) in enumerate(
        zip(case.columns, case.spans, strict=True)
    ):
        expected = np.zeros((case.buckets, rank, width))
        its_v = v[:, case.tile * term : case.tile * (term + 1)].astype(float)
        for bucket, begin, end in zip(buckets, begins, ends, strict=True):
            slot, group = divmod(bucket, case.groups)
            its = right[begin:end, start : start + width].astype(float)
            expected[bucket] += left[begin:end, column : column + rank].astype(float).T @ its
            scaling = scalings[term][slot, group % case.scaling_groups]
            of_rows = scaling * (its @ factors[term][slot, group].astype(float).T)
            found = its_v[begin:end]
            np.testing.assert_allclose(found[:, :rank], of_rows, rtol=2**-8, atol=1e-3)
            assert not found[:, rank:].any()  # a product reads whole rank tiles
        np.testing.assert_allclose(sums[term].astype(float), expected, rtol=2**-8, atol=1e-4)


@st.composite
def runs_of(draw, case: Case):
    """Buckets of runs, and where these begin and end, with rows of nobody between."""
    count = draw(st.integers(1, 5))
    cuts = st.lists(st.integers(0, case.rows), min_size=2 * count, max_size=2 * count)
    cuts = draw(cuts.map(sorted))
    bucket = st.integers(0, case.buckets - 1)
    buckets = draw(st.lists(bucket, min_size=count, max_size=count).map(sorted))
    return tuple(np.array(its, np.int32) for its in (buckets, cuts[::2], cuts[1::2]))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CASES)
@settings(QUICK, max_examples=2)
@given(data=st.data())
def test_both(name, data):
    check(CASES[name], *data.draw(runs_of(CASES[name])), 0)


@pytest.mark.interpreter
def test_a_long_run_and_an_empty_one():
    """A bucket of three parts, whose last has no slice, one of one, and one without a run."""
    case = Case(150, ((0, 16),), ((0, 300),), chunk=64, slots=1, groups=3)
    starts, ends = np.array([0, 130], np.int32), np.array([130, 149], np.int32)
    check(case, np.array([0, 2]), starts, ends, 0)


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("name", CASES | SLOW_CASES)
@settings(QUICK, max_examples=6)
@given(data=st.data(), seed=st.integers(0, 99))
def test_both_of_many(name, data, seed):
    case = (CASES | SLOW_CASES)[name]
    check(case, *data.draw(runs_of(case)), seed)


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(0, 1500), min_size=16, max_size=16))
def test_units(sizes):
    """Every bucket has its parts, each of which has room for its rows, long ones first."""
    ends = np.cumsum(sizes).astype(np.int32)
    begins, number = (ends - sizes).astype(np.int32), np.arange(len(sizes), dtype=np.int32)
    runs = gpu_rows.Runs(number, number + (ends > begins), begins, ends)
    chunk = units.CHUNK
    words = np.asarray(units.units_of(runs, 16 * 1500, 1))
    words = words.reshape(-1, units.WORDS)
    found = words[: words[0, -1]]
    assert len(found) <= len(words)
    bucket, part, parts = found.T[:3]
    for its, size in enumerate(sizes):
        of_bucket = bucket == its
        count = 1 if size <= chunk else -(-size // units.PART)
        assert sorted(part[of_bucket]) == list(range(count)) and set(parts[of_bucket]) == {count}
    lengths = np.minimum(-(-np.array(sizes) // 64), chunk // 64 + 1)[bucket]
    assert (np.diff(lengths) <= 0).all()
    rows = np.array(sizes)[bucket]
    np.testing.assert_array_equal(found[:, 6] - found[:, 5], rows)


SERVED = dict(rows=4096, slots=1, groups=64, factor_groups=64, rank=16)


@pytest.mark.parametrize(
    "change, is_served",
    [
        ({}, True),
        (dict(rank=32), True),
        (dict(slots=3), True),
        (dict(slots=3, in_order=False), True),
        (dict(rows=2048), False),
        (dict(groups=63, factor_groups=63), False),
        (dict(factor_groups=1), False),
        (dict(rank=33), False),
    ],
    ids=str,
)
def test_which_calls_it_serves(change, is_served):
    sizes = SERVED | dict(in_order=True) | change
    rows, slots, groups, rank = (sizes[name] for name in ("rows", "slots", "groups", "rank"))
    place = jnp.zeros(rows, jnp.int32)
    pieces = gpu_rows.Pieces(place, place, place)
    tables = gpu_rows.Tables(place, place, pieces, None, in_order=sizes["in_order"])
    factor = jnp.zeros((slots, sizes["factor_groups"], rank, 64), jnp.bfloat16)
    left = Columns(jnp.zeros((rows, 64), jnp.bfloat16), 0, rank)
    right = jnp.zeros((rows, 64), jnp.bfloat16)

    def kernel(left, columns, right, spans, runs, factors, scalings, tile):
        return jnp.zeros((rows, 64)), (jnp.zeros((slots * groups, rank, 64)),)

    with mock.patch.object(mosaic_gpu, "shrink_outer_kernel", kernel):
        scalings = (jnp.ones((slots, 1)),)
        arrays = ((left, rank),), right, tables, (factor,), (0,), scalings, (0,)
        found = mosaic_gpu.shrink_with_outer(*arrays)
    assert (found is not None) == is_served


@pytest.mark.gpu
@pytest.mark.parametrize("broken", [False, True], ids=["", "beside a slot of NaN"])
@pytest.mark.parametrize(
    "tokens, choices, groups, widths, ranks, slots",
    [
        (4096, 8, 128, (2048,), (16,), 1),
        (1000, 8, 80, (320, 192), (12, 16), 3),
        (5000, 2, 64, (768, 768), (32, 24), 2),  # buckets of several parts
    ],
)
def test_bits_are_those_of_two_kernels(tokens, choices, groups, widths, ranks, slots, broken):
    rng = np.random.default_rng(0)
    uneven = rng.dirichlet(np.full(groups, 2.0))
    group = rng.choice(groups, (tokens, choices), p=uneven).astype(np.int32)
    token_slots = rng.integers(-1, slots, tokens).astype(np.int32)
    factors = [
        normal(rng, slots, groups, rank, width) for rank, width in zip(ranks, widths, strict=True)
    ]
    scalings = [rng.standard_normal((slots, 1)).astype(np.float32) for _ in ranks]
    starts = tuple(sum(widths[:term]) for term in range(len(widths)))
    x, right = normal(rng, tokens, 64), normal(rng, tokens * choices, sum(widths))
    into = [normal(rng, slots, groups, rank, 64) for rank in ranks]

    @jax.jit
    def call(x, right, group, token_slots, into, factors, scalings):
        route, rows, _ = mosaic_gpu.dispatch(x, groups, slots, group, token_slots, None)
        tables, zeros = route.tables, (0,) * len(ranks)
        if broken:
            right = jnp.where((tables.row_slots == slots - 1)[:, None], jnp.nan, right)
        u = mosaic_gpu.shrink(rows, tables, into, zeros, scalings, zeros)
        lefts = tuple(zip(u, ranks, strict=True))
        arrays = right, tables, factors, starts, scalings, zeros
        together = mosaic_gpu.shrink_with_outer(lefts, *arrays)
        spans = tuple(zip(starts, widths, strict=True))
        shape = slots, groups
        sums = mosaic_gpu.outer(lefts, right, spans, tables, 0, shape, right.dtype)
        alone = mosaic_gpu.shrink(*arrays), sums
        arrays_of = [([jnp.asarray(its) for its in v], sums) for v, sums in (together, alone)]
        return tables.row_slots, *arrays_of

    if broken:
        for factor in factors:
            factor[-1] = np.inf
    arguments = x, right, group, token_slots, into, factors, scalings
    row_slots, together, alone = jax.tree.map(np.asarray, call(*arguments))
    whole = slots - 1 if broken else slots
    kept = (row_slots >= 0) & (row_slots < whole)
    for found, expected, rank in zip(together[0], alone[0], ranks, strict=True):
        assert found[kept, :rank].tobytes() == expected[kept, :rank].tobytes()
        assert np.isfinite(found[kept, :rank]).all()
    for found, expected in zip(together[1], alone[1], strict=True):
        assert found[:whole].tobytes() == expected[:whole].tobytes()
        assert np.isfinite(found[:whole]).all()
