"""Rows that are laid out and shrunk in one kernel: in the interpreter, and the memory it takes."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul import gpu_rows, gpu_spread, lora, mosaic_gpu
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import Span
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import (
    packed_columns,
    rank_tile,
    shrink_of_spread,
    shrink_schedule,
)
from pallas_kernels.grouped_lora_matmul.gpu_spread_shrink import spread_and_shrink
from pallas_kernels.hopper import gather
from tests.pallas_kernels import tpu_interpreter as definition
from tests.pallas_kernels.cases import in_layers
from tests.pallas_kernels.gpu_interpreter import PROGRAMS, interpret, normal

GROUPS = 16
MANY = 10_000  # rows, whose schedule the few here have


@dataclasses.dataclass(frozen=True)
class Case:
    """Static sizes: terms of these ranks go class by class, `firsts` are the classes' first slots.

    A class has all slots from its first one on.
    """

    tokens: int
    choices: int
    k: int
    ranks: tuple[int, ...]
    groups: int = 3
    slots: int = 2
    firsts: tuple[int, ...] = (0,)
    layered: bool = False

    @functools.cached_property
    def compiled(self):
        parts = len(self.ranks) // len(self.firsts)
        widest = tuple(max(self.ranks[part::parts]) for part in range(parts))
        schedule = shrink_schedule(MANY, widest, rank_tile(max(widest)), self.k)
        schedule = shrink_of_spread(schedule, widest, 2 * self.k)
        schedule = dataclasses.replace(schedule, programs=PROGRAMS, stages=2)

        def call(x, route, factors, scalings):
            arguments = x, route, factors, scalings, self.firsts, schedule
            return spread_and_shrink(*arguments, interpreted=True)

        return jax.jit(call)

    def class_of(self, term: int) -> range:
        """The slots of a term."""
        number = term // (len(self.ranks) // len(self.firsts))
        ends = (*self.firsts, self.slots)
        return range(ends[number], ends[number + 1])

    def run(self, x, route, factors, scalings):
        if self.layered:
            factors, scalings = in_layers((factors, scalings))
        with mock.patch.object(gpu_spread, "PROGRAMS", PROGRAMS):
            return interpret(self.compiled, x, route, factors, scalings)


CASES = {
    "two terms": Case(14, 3, 256, (8, 24)),
    "columns past the last": Case(9, 2, 320, (16,), slots=1),
}
SLOW_CASES = {
    "a layer of several": Case(14, 3, 192, (8, 24), layered=True),
    "rank classes": Case(14, 2, 512, (8, 8, 24, 16), slots=3, firsts=(0, 2)),
    "many ranks": Case(12, 2, 256, (64, 40)),
    "long runs": Case(90, 1, 64, (16,), groups=1, slots=1),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def route_of(groups, slots, group, token_slots):
    return gpu_rows.plan(groups, slots, group, token_slots)


def check(case: Case, group, token_slots, seed: int):
    rng = np.random.default_rng(seed)
    x = normal(rng, case.tokens, case.k)
    factors = tuple(
        normal(rng, len(case.class_of(term)), case.groups, rank, case.k)
        for term, rank in enumerate(case.ranks)
    )
    scalings = tuple(rng.standard_normal(its.shape[:2]).astype(np.float32) for its in factors)
    route = jax.tree.map(np.asarray, route_of(case.groups, case.slots, group, token_slots))
    rows, u = case.run(x, route, factors, scalings)
    assert rows.tobytes() == x[route.token].tobytes()
    slots, of_group = np.asarray(route.tables.row_slots), np.asarray(route.tables.group_of_row)
    sizes = np.bincount(of_group, minlength=case.groups)[: case.groups].astype(np.int32)
    _, owned = packed_columns(case.ranks, rank_tile(max(case.ranks)))
    for term, (its, factor) in enumerate(zip(u, factors, strict=True)):
        its_slots = case.class_of(term)
        mine = np.isin(slots, its_slots)
        if not mine.any():
            continue
        found = its.array[:, its.first : its.first + its.rank][mine].astype(np.float64)
        own = np.where(mine, slots - its_slots.start, -1).astype(np.int32)
        terms = (factor,), (0,), (scalings[term],)
        (expected,) = definition.shrink(rows, sizes, own, *terms)
        limit = 2e-2 * np.abs(expected[mine]).max()
        np.testing.assert_allclose(found, expected[mine], rtol=2e-2, atol=limit)
        if len(case.firsts) == 1:  # a product reads whole rank tiles
            past = its.array[mine, its.first + its.rank : its.first + owned[term]]
            assert not past.any()


def routings(case: Case):
    group = st.integers(0, case.groups)  # the last: no group works on it
    return st.tuples(
        st.lists(group, min_size=case.tokens * case.choices, max_size=case.tokens * case.choices),
        st.lists(st.integers(-1, case.slots - 1), min_size=case.tokens, max_size=case.tokens),
    )


def check_drawn(case: Case, data, seed=0):
    group, token_slots = data.draw(routings(case))
    group = np.array(group, np.int32).reshape(case.tokens, case.choices)
    check(case, group, np.array(token_slots, np.int32), seed)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_rows_and_u(name, data):
    check_drawn(CASES[name], data)


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("name", CASES | SLOW_CASES)
@settings(deadline=None, max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data(), seed=st.integers(0, 99))
def test_rows_and_u_of_many(name, data, seed):
    check_drawn((CASES | SLOW_CASES)[name], data, seed)


@pytest.mark.interpreter
@pytest.mark.parametrize("token_slots", [-1, 0])
def test_no_adapter_and_one(token_slots):
    """Programs without pieces, and without rows to copy."""
    case = CASES["two terms"]
    group = np.random.default_rng(0).integers(0, case.groups, (case.tokens, case.choices))
    check(case, group.astype(np.int32), np.full(case.tokens, token_slots, np.int32), 1)


@pytest.mark.interpreter
def test_a_slot_of_nan_stays_apart():
    case = CASES["two terms"]
    rng = np.random.default_rng(0)
    group = rng.integers(0, case.groups, (case.tokens, case.choices)).astype(np.int32)
    token_slots = np.resize(np.array([0, 1, -1, 1], np.int32), case.tokens)
    route = jax.tree.map(np.asarray, route_of(case.groups, case.slots, group, token_slots))
    x = normal(rng, case.tokens, case.k)
    factors = tuple(normal(rng, case.slots, case.groups, rank, case.k) for rank in case.ranks)
    scalings = (np.ones((case.slots, case.groups), np.float32),) * 2
    _, clean = case.run(x, route, factors, scalings)
    for factor in factors:
        factor[1] = np.nan
    x[token_slots == 1] = np.nan
    rows, found = case.run(x, route, factors, scalings)
    kept = np.asarray(route.tables.row_slots) == 0
    assert rows.tobytes() == x[route.token].tobytes()
    for its, before in zip(found, clean, strict=True):
        assert its.array[kept].tobytes() == before.array[kept].tobytes()


def test_memory():
    """Stages of both where rows are as wide as any model's; none where they are too wide."""
    schedule = shrink_schedule(MANY, (16, 16), 16, 2048)
    assert shrink_of_spread(schedule, (16, 16), 2 * 2048).stages == 3
    assert shrink_of_spread(schedule, (16, 16), 2 * 7168).stages == 3
    assert shrink_of_spread(schedule, (32, 32), 2 * 2048).stages == 2
    assert shrink_of_spread(schedule, (64, 64), 2 * 7168).stages == 2
    assert shrink_of_spread(schedule, (64, 64), 2 * 32768) is None
    assert schedule.heights[-1] <= gather.ROWS


@pytest.mark.parametrize("width", range(64, 1088, 64))
def test_lanes_past_a_row_are_known(width):
    """Lines are loaded in pairs: a row's end may be inside of one, or before one."""
    span = Span(0, width, [0], 0, 16, gather.TOGETHER)
    lines = gather.Lines(None, None, None, width, 0, again=False, interpreted=False)
    assert lines.is_whole == (span.k_steps * gather.LINE == width)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, choices, hidden, ranks, slots",
    [
        (300, 8, 320, (8, 24), 5),
        (1000, 3, 256, (16, 16), 2),  # a line, and one past the row
        (600, 5, 768, (8, 8), 3),
        (4096, 8, 1024, (16, 16), 1),  # more than the L2 holds
        (700, 4, 2048, (64, 40), 3),
        (2500, 1, 512, (16, 16), 2),
    ],
)
def test_bits_are_those_of_two_kernels(tokens, choices, hidden, ranks, slots):
    rng = np.random.default_rng(0)
    group = np.stack([rng.permutation(GROUPS + 1)[:choices] for _ in range(tokens)])
    token_slots = rng.integers(-1, slots, tokens).astype(np.int32)
    factors = [normal(rng, slots, GROUPS, rank, hidden) for rank in ranks]
    scalings = [rng.standard_normal(its.shape[:2]).astype(np.float32) for its in factors]
    x = normal(rng, tokens, hidden)

    @jax.jit
    def call(x, group, token_slots, factors, scalings):
        routing, zeros = (GROUPS, slots, group, token_slots, None), (0,) * len(ranks)
        pairs = map(lora.Lora, factors, factors, scalings)
        terms = tuple(lora.Term(0, 0, pair) for pair in pairs)
        _, together, made = mosaic_gpu.dispatch(x, *routing, terms)
        route, rows, none = mosaic_gpu.dispatch(x, *routing)
        assert made is not None and none is None
        u = mosaic_gpu.shrink(rows, route.tables, factors, zeros, scalings, zeros)
        both = [tuple(map(jnp.asarray, its)) for its in (made, u)]
        return route.tables.row_slots, (together, rows), both

    found = call(x, group.astype(np.int32), token_slots, factors, scalings)
    row_slots, rows, (made, u) = jax.tree.map(np.asarray, found)
    assert rows[0].tobytes() == rows[1].tobytes()
    for found, expected in zip(made, u, strict=True):
        assert found[row_slots >= 0].tobytes() == expected[row_slots >= 0].tobytes()
