"""The Hopper kernels on a CPU: random calls in Pallas's Mosaic GPU interpreter.

The interpreter checks every access to memory for races, and fills memory that nobody wrote with
NaN. It knows no layouts, no registers and no limits of memory: compiling finds those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import implementation
from pallas_kernels.grouped_lora_matmul import (
    gpu_outer,
    gpu_rows,
    gpu_shrink_outer,
    gpu_shrink_outer_units,
    gpu_spread,
)
from pallas_kernels.grouped_lora_matmul.gate import gated
from pallas_kernels.grouped_lora_matmul.gpu_experts import Logits, Product, Shrink, experts_kernel
from pallas_kernels.grouped_lora_matmul.gpu_outer import outer_kernel
from pallas_kernels.grouped_lora_matmul.gpu_product import Terms, product_kernel
from pallas_kernels.grouped_lora_matmul.gpu_product_inner import Inner, Unmade
from pallas_kernels.grouped_lora_matmul.gpu_product_normed import Norm
from pallas_kernels.grouped_lora_matmul.gpu_schedule import (
    BYTES_BESIDE,
    ProductSchedule,
    experts_schedules,
    product_schedule,
    shrink_ahead,
)
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Columns, shrink_kernel
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import ShrinkLayout
from pallas_kernels.grouped_lora_matmul.gpu_shrink_outer import shrink_outer_kernel
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import (
    packed_columns,
    rank_tile,
    shrink_of_tiles,
    shrink_schedule,
)
from pallas_kernels.grouped_lora_matmul.gpu_slices import columns_of_terms
from pallas_kernels.hopper.kept_kernel import nothing_kept
from tests.pallas_kernels import tpu_interpreter as definition
from tests.pallas_kernels.cases import in_layers
from tests.pallas_kernels.plain_callbacks import plain_callbacks
from tests.pallas_kernels.product_cases import ProductSizes, Term
from tests.pallas_kernels.tpu_interpreter import groups_of_rows

EPS = 1e-6
PROGRAMS = 2  # of each kernel: the interpreter runs them after each other
DEVICE = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=PROGRAMS, platform="gpu")
)


@contextlib.contextmanager
def interpreter(detect_races: bool = True, begins_early: bool = False):
    """Interprets the one kernel that runs inside, and fails if it races.

    Args:
      begins_early: whether it goes the ways of kernels that do, see `hopper.dependent_launch`.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

    params = plgpu.InterpretGPUParams(detect_races=detect_races, uninitialized_memory="nan")
    ended = functools.partialmethod(_deallocate, shared_memory.Barrier.deallocate)
    try:
        with (
            use_abstract_mesh(DEVICE),
            plgpu.force_gpu_interpret_mode(params),
            mock.patch.object(shared_memory.Barrier, "deallocate", ended),
            mock.patch.object(implementation, "DEPENDENT_LAUNCH", begins_early),
            # The interpreter knows none of it: there kernels run one after another.
            mock.patch.object(plgpu, "griddepcontrol_wait", lambda: None),
            mock.patch.object(plgpu, "griddepcontrol_launch_dependents", lambda: None),
            nothing_kept(),
            plain_callbacks(),
            mock.patch.object(shared_memory, "_to_int", _number),
        ):
            yield
        assert not gpu_callbacks.get_races().races_found, "the kernel races: see the output"
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def _number(its):
    """Of a thread or a device; JAX's own function takes JAX's arrays alone."""
    return its if isinstance(its, jax.core.Tracer) else int(its)


def _deallocate(barrier, original):
    """Lets a kernel end with stages that were released and that nobody fills again.

    The hardware does not mind. The interpreter takes it for a wait that is missing.
    """
    with barrier.cv:
        if barrier.ref_count == 1:
            barrier.last_observed_phase_by_thread.clear()
    original(barrier)


def interpret(function, *arguments, **options):
    """Results of a jitted function with one kernel, as NumPy arrays; options of `interpreter`."""
    with interpreter(**options):
        return jax.tree.map(np.asarray, function(*arguments))


@functools.cache
def tables_of(groups: int):
    return jax.jit(functools.partial(gpu_rows.tables, groups=groups))


def normal(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class ProductCase(ProductSizes):
    """A product in whole multiples of 64; `cut` replaces parts of its schedule.

    `firsts` are the first slots of rank classes: `run` takes the factors of each, class by class.
    With `layered` W and the factors are of one of several layers, the others' are NaN.
    """

    groups: int = 4
    slots: int = 3
    firsts: tuple[int, ...] = (0,)
    out_dtype: str = "bfloat16"
    cut: tuple[tuple[str, object], ...] = ()
    layered: bool = False

    @functools.cached_property
    def compiled(self):
        parts = 1 if self.gate is None else 2
        out_dtype = jnp.dtype(self.out_dtype)
        width = self.n // parts
        sizes = self.rows, self.groups, width, parts, out_dtype.itemsize, self.contract
        schedule = product_schedule(*sizes, biased=self.biased)
        cut = dict(programs=PROGRAMS, stages=min(schedule.stages, 3)) | dict(self.cut)
        schedule = dataclasses.replace(schedule, **cut)
        ranks = tuple(term.rank for term in self.terms) or (8,)
        first, _ = packed_columns(ranks, rank_tile(max(ranks)))

        @jax.jit
        def product(tables, x, w, u, factors, bias=None):
            columns = tuple(
                Columns(u, start, term.rank)
                for start, term in zip(first, self.terms, strict=bool(self.terms))
            )
            terms = Terms(columns * len(self.firsts), factors) if factors else None
            return product_kernel(
                tables,
                x,
                w,
                terms,
                schedule=schedule,
                **(self.static | self.of_terms),
                out_dtype=out_dtype,
                bias=bias,
                interpreted=True,
            )

        return product

    @property
    def of_terms(self):
        starts = tuple(term.start for term in self.terms)
        firsts = tuple(first for first in self.firsts for _ in self.terms)
        return dict(starts=starts * len(self.firsts), firsts=firsts)

    def arguments(self, group_sizes, row_slots, seed=0):
        """x, w, group_sizes, row_slots, u, factors; what nobody may read is NaN."""
        rng = np.random.default_rng(seed)
        group = groups_of_rows(group_sizes, self.rows)
        x = normal(rng, self.rows, self.k)
        x[group < 0] = np.nan
        w = normal(rng, *self.w_shape, scale=self.k**-0.5)
        w[np.asarray(group_sizes) == 0] = np.nan
        u = [normal(rng, self.rows, term.rank) for term in self.terms]
        for low in u:
            low[(row_slots < 0) | (group < 0)] = np.nan
        shapes = [term.factor_shape(self.slots, self.groups) for term in self.terms]
        factors = [normal(rng, *shape) for shape in shapes]
        return x, w, group_sizes, row_slots, tuple(u), tuple(factors)

    def packed(self, u):
        """u of all terms in one array: zeros past a term's ranks, NaN past what it owns."""
        ranks = tuple(term.rank for term in self.terms)
        first, owned = packed_columns(ranks, rank_tile(max(ranks)))
        width = -(-(first[-1] + owned[-1]) // 64) * 64
        array = np.full((self.rows, width), np.nan, jnp.bfloat16)
        for low, start, size in zip(u, first, owned, strict=True):
            array[:, start : start + size] = 0
            array[:, start : start + low.shape[1]] = low
        return array

    def run(self, x, w, group_sizes, row_slots, u, factors):
        tables = tables_of(self.groups)(group_sizes, row_slots)
        u = self.packed(u) if self.terms else ()
        bias = self.bias("bfloat16")
        if self.layered:
            w, factors, bias = in_layers((w, factors, bias))
        return interpret(self.compiled, tables, x, w, u, factors, bias)

    def expect(self, *arguments):
        return definition.product(*arguments, **self.static, bias=self.bias("bfloat16"))


@dataclasses.dataclass(frozen=True)
class InnerCase(ProductCase):
    """A product that makes u itself, of rows that are a tile each, in any order of groups, or of
    equal groups (of one row each, or one of all)."""

    detect_races: bool = True
    begins_early: bool = False
    equal: bool = False

    @functools.cached_property
    def compiled(self):
        width = self.n // (1 if self.gate is None else 2)
        parts = self.n // width
        ranks = tuple(term.rank for term in self.terms)
        used = rank_tile(max(ranks)) * (len(ranks) if self.gate is not None else 1)
        sizes = self.rows, self.groups, width, parts
        of_case = dict(equal=self.equal, biased=self.biased, alone=self.groups == 1 < self.rows)
        if self.gate is None:
            of_case["columns"] = columns_of_terms(width, *self.columns)
        schedule = product_schedule(*sizes, made_ranks=used, **of_case)
        cut = dict(programs=PROGRAMS, stages=min(schedule.stages, 3)) | dict(self.cut)
        schedule = dataclasses.replace(schedule, **cut)

        @jax.jit
        def product(tables, x, w, unmade, factors, bias, norm=None):
            inner = Inner(unmade, *self.columns, self.gate is not None)
            assert inner.fits(schedule.features)
            return product_kernel(
                tables,
                x,
                w,
                Terms((), factors, unmade),
                schedule=schedule,
                **(self.static | self.of_terms),
                out_dtype=jnp.dtype(self.out_dtype),
                bias=bias,
                norm=norm and Norm(*norm, EPS),
                interpreted=True,
            )

        return product

    @property
    def columns(self):
        """The first columns of the terms, and how many they have."""
        return tuple(zip(*((term.start, term.width) for term in self.terms), strict=True))

    def check(self, group, row_slots, seed=0):
        """Runs it for rows of these groups (`groups`: of none) and slots; (found, expected)."""
        x, w, a, b, scalings = call = self.arguments_of(group, row_slots, seed)
        unmade, factors = tuple(map(Unmade, a, scalings)), tuple(b)
        tables = self.tables(group, row_slots)
        arguments = w, unmade, factors, self.bias("bfloat16")
        if self.layered:
            arguments = in_layers(arguments)
        found = interpret(self.compiled, tables, x, *arguments, **self.of_interpreter)
        return found, self.of_rows(*call, group, row_slots)

    @property
    def of_interpreter(self):
        return dict(detect_races=self.detect_races, begins_early=self.begins_early)

    def check_normed(self, slot, more: bool):
        """Runs it for the one row of a slot, which it norms; (found, expected)."""
        group, slots = np.zeros(1, np.int32), np.array([slot])
        x, w, a, b, scalings = self.arguments_of(group, slots)
        rng = np.random.default_rng(1)
        added = normal(rng, 1, self.k) if more else None
        weight = normal(rng, self.k)
        arguments = w, tuple(map(Unmade, a, scalings)), tuple(b), self.bias("bfloat16")
        norm = x, added, weight
        if self.layered:
            *arguments, weight_of_layer = in_layers((*arguments, weight))
            norm = x, added, weight_of_layer
        tables = self.tables(group, slots)
        found = interpret(self.compiled, tables, x, *arguments, norm, **self.of_interpreter)
        total = x if added is None else (np.float32(x) + np.float32(added)).astype(x.dtype)
        wide = np.float32(total)
        scale = 1 / np.sqrt((wide * wide).mean() + EPS)
        normed = (wide * scale).astype(x.dtype) * weight
        y = self.of_rows(normed, w, a, b, scalings, group, slots)
        return found, (y, *([total] if more else []), normed)

    def arguments_of(self, group, row_slots, seed=0):
        """x, w, and A, B and the scalings of each term; NaN where no row is of their slot and
        group."""
        rng = np.random.default_rng(seed)
        x = normal(rng, self.rows, self.k)
        x[group == self.groups] = np.nan
        w = normal(rng, *self.w_shape, scale=self.k**-0.5)
        of_row = row_slots[:, None] == np.arange(self.slots)
        used = (of_row[:, :, None] & (group[:, None, None] == np.arange(self.groups))).any(0)
        a, b, scalings = [], [], []
        for term in self.terms:
            shape = term.factor_shape(self.slots, self.groups)
            a.append(normal(rng, *shape[:3], self.k, scale=self.k**-0.5))
            b.append(normal(rng, *shape))
            scalings.append(rng.standard_normal(shape[:2]).astype(np.float32))
            unused = ~(used.any(1, keepdims=True) if term.shared else used)
            for its in (a[-1], b[-1]):
                its[unused] = np.nan
        return x, w, a, b, scalings

    def tables(self, group, row_slots):
        if self.equal:
            return gpu_rows.tables(None, jnp.asarray(row_slots, jnp.int32), self.groups)
        place = np.asarray(gpu_rows.place_of(group, row_slots, self.groups), np.int32)
        end = np.arange(1, self.rows + 1, dtype=np.int32)
        return gpu_rows.Tables(place, end, gpu_rows.Pieces(place, place, place), None)

    def of_rows(self, x, w, a, b, scalings, group, row_slots):
        """The definition, row by row, of whole numbers of groups and slots."""
        y = np.zeros((self.rows, self.n))
        for row in np.flatnonzero(group < self.groups):
            here = x[row].astype(np.float64)
            y[row] = w[group[row]].astype(np.float64) @ here
            for term, its_a, its_b, scaling in zip(self.terms, a, b, scalings, strict=True):
                if row_slots[row] < 0:
                    continue
                place = row_slots[row], 0 if term.shared else group[row]
                u = scaling[place] * (its_a[place].astype(np.float64) @ here)
                u = u.astype(jnp.bfloat16).astype(np.float64)
                columns = slice(term.start, term.start + term.width)
                y[row, columns] += u @ its_b[place].astype(np.float64)
            if self.biased:
                y[row] += self.bias("bfloat16")[group[row]].astype(np.float64)
        if self.gate is None:
            return y
        left, right = (
            half.astype(jnp.bfloat16).astype(np.float32) for half in np.split(y, 2, axis=1)
        )
        return np.asarray(gated(left, right, self.gate), np.float64)


def experts(into: InnerCase, out: InnerCase, group, row_slots, call, of_out, width, by=None):
    """Both products in one kernel, whose one program has tiles of `width` features of the gate.

    It chooses the experts too if they are chosen by some `Logits`.
    """
    tables = into.tables(group, row_slots)

    def product(case, w, a, b, scalings):
        bias = case.bias("bfloat16")
        if case.layered:
            w, a, b, scalings, bias = in_layers((w, a, b, scalings, bias))
        terms = Terms((), tuple(b), tuple(map(Unmade, a, scalings))) if case.terms else None
        parts = 1 if case.gate is None else 2
        ranks = [rank_tile(max(term.rank for term in case.terms))] if case.terms else [0]
        ranks = sum(ranks * (parts if case.terms else 1))
        return (w, terms, bias), case.of_terms["starts"], ranks

    products = product(into, *call[1:]), product(out, *of_out[1:])
    n, hidden = into.n // 2, out.n
    ranks = (its[-1] for its in products)
    sizes = into.rows, n, hidden, *ranks, into.biased, by is not None
    *schedules, ring_rows = experts_schedules(*sizes)
    cut = dict(programs=1, stages=3)
    schedules = [dataclasses.replace(its, **cut) for its in schedules]
    schedules[0] = dataclasses.replace(schedules[0], width=width)
    ring_rows = max(ring_rows, 2 * width + 64)

    @jax.jit
    def run(tables, x, arrays, of_choice):
        both = (
            Product(w, terms, starts, (0,) * len(starts), schedule, bias)
            for (w, terms, bias), (_, starts, _), schedule in zip(
                arrays, products, schedules, strict=True
            )
        )
        chosen_by = by and Logits(*of_choice, *by[3:])
        known = ring_rows, None, chosen_by
        return experts_kernel(tables, x, *both, into.gate, *known, interpreted=True)

    if by:
        tables = gpu_rows.chosen(by.tokens, by.top_k)
    arguments = tables, call[0], [its[0] for its in products], by and by[:3]
    return interpret(run, *arguments, **into.of_interpreter)


def experts_of_tiles(into: ProductCase, out: InnerCase, batch, seed=0):
    """Both products in one kernel, whose one program has all tiles; (found, expected)."""
    x, w, group_sizes, row_slots, u, factors = arguments = into.arguments(*batch, seed)
    group = groups_of_rows(group_sizes, into.rows)
    group = np.where(group < 0, into.groups, group)
    _, w_out, a, b, scalings = out.arguments_of(group, np.asarray(row_slots), seed + 1)
    heights = product_schedule(into.rows, into.groups, 64).heights
    schedules = [ProductSchedule(blocks, 1, heights, 1, 3, 2, 1, 1) for blocks in (1, 2)]
    ranks = [[term.rank for term in case.terms] or [8] for case in (into, out)]
    columns, _ = packed_columns(tuple(ranks[0]), rank_tile(max(ranks[0])))
    ring_rows, tile = 128, rank_tile(max(ranks[1]))

    @jax.jit
    def run(tables, x, u, of_into, of_out):
        (w, factors, bias), (w_out, a, b, scalings) = of_into, of_out
        terms, shrink = (None, None), None
        if factors:
            its = map(Columns, [u] * len(columns), columns, ranks[0])
            terms = Terms(tuple(its), factors), Terms((), b)
            h = jax.ShapeDtypeStruct((into.rows, out.k), x.dtype)
            schedule = dataclasses.replace(shrink_of_tiles(tile), programs=1)
            layout = ShrinkLayout(h, a, scalings, (0,), (0,), schedule, True)
            shrink = Shrink(a, scalings, layout)
        products = (
            Product(w, terms[0], *into.of_terms.values(), schedules[0], bias),
            Product(w_out, terms[1], *out.of_terms.values(), schedules[1]),
        )
        known = ring_rows, shrink
        return experts_kernel(tables, x, *products, into.gate, *known, interpreted=True)

    of_into = w, factors, into.bias("bfloat16")
    of_out = w_out, tuple(a), tuple(b), tuple(scalings)
    if into.layered:
        of_into, of_out = in_layers((of_into, of_out))
    tables = tables_of(into.groups)(group_sizes, row_slots)
    u = into.packed(u) if into.terms else None
    found = interpret(run, tables, x, u, of_into, of_out)
    h = into.expect(*arguments).astype(jnp.bfloat16)
    return found, out.of_rows(h, w_out, a, b, scalings, group, np.asarray(row_slots))


@dataclasses.dataclass(frozen=True)
class BesideCase(InnerCase):
    """Few rows, in equal groups, whose first programs make u; `block` rows are a unit of theirs.

    The interpreter has no semaphores, and so takes the others' reading of u for a race. They do
    read it later, as programs run one after the other.
    """

    groups: int = 1
    block: int = 2
    detect_races: bool = False
    equal: bool = True

    @functools.cached_property
    def compiled(self):
        ranks = tuple(term.rank for term in self.terms)
        tile, starts = rank_tile(max(ranks)), (0,) * len(ranks)
        shrink = shrink_schedule(self.rows, ranks, tile, self.k)
        shrink = dataclasses.replace(shrink, block=self.block, stages=2, programs=PROGRAMS)
        parts = 1 if self.gate is None else 2
        sizes = self.rows, self.groups, self.n // parts, parts
        schedule = product_schedule(*sizes, equal=True, beside=BYTES_BESIDE, biased=self.biased)
        schedule = dataclasses.replace(schedule, **dict(self.cut))

        @jax.jit
        def product(tables, x, w, unmade, factors, bias):
            a, scalings = zip(*unmade, strict=True)
            beside = ShrinkLayout(x, a, scalings, (0,), starts, shrink, True)
            return product_kernel(
                tables,
                x,
                w,
                Terms((), factors, unmade, beside),
                schedule=schedule,
                **(self.static | self.of_terms),
                out_dtype=jnp.dtype(self.out_dtype),
                bias=bias,
                interpreted=True,
            )

        return product


@dataclasses.dataclass(frozen=True)
class AheadCase(BesideCase):
    """Few rows in tiles of their groups, of which all u is made by the first program, before its
    tiles: the others begin when it has ended."""

    groups: int = 4
    equal: bool = False

    @functools.cached_property
    def compiled(self):
        ranks = tuple(term.rank for term in self.terms)
        tile, starts = rank_tile(max(ranks)), (0,) * len(ranks)
        shrink = shrink_schedule(self.rows, ranks, tile, self.k)
        parts = 1 if self.gate is None else 2
        sizes = self.rows, self.groups, self.n // parts, parts
        schedule = product_schedule(*sizes, beside=BYTES_BESIDE, biased=self.biased)
        schedule = dataclasses.replace(schedule, **dict(self.cut), programs=shrink.programs)
        cut = dict(block=self.block, programs=1)

        @jax.jit
        def product(tables, x, w, unmade, factors, bias):
            a, scalings = zip(*unmade, strict=True)
            a_ranks = ShrinkLayout(x, a, scalings, (0,), starts, shrink, True).a_ranks
            ahead = shrink_ahead(shrink, a_ranks, schedule, parts * schedule.features)
            ahead = dataclasses.replace(ahead, **cut)
            return product_kernel(
                tables,
                x,
                w,
                Terms((), factors, unmade, ShrinkLayout(x, a, scalings, (0,), starts, ahead, True)),
                schedule=dataclasses.replace(schedule, programs=PROGRAMS),
                **(self.static | self.of_terms),
                out_dtype=jnp.dtype(self.out_dtype),
                bias=bias,
                interpreted=True,
            )

        return product

    def tables(self, group, row_slots):
        sizes = np.bincount(group, minlength=self.groups + 1)[: self.groups].astype(np.int32)
        return tables_of(self.groups)(sizes, row_slots)


@dataclasses.dataclass(frozen=True)
class ShrinkCase:
    """Static sizes of a shrink of the columns [start, start + width) of x, or of one span for each
    rank.

    `as_of` is the number of rows whose schedule it has: with few rows terms are apart, with many
    runs are shrunk piece by piece. `firsts` as of a `ProductCase`.
    """

    rows: int
    k: int
    ranks: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] = ()
    shared: tuple[bool, ...] = ()
    groups: int = 4
    slots: int = 3
    as_of: int | None = None
    firsts: tuple[int, ...] = (0,)
    stages: int = 2
    layered: bool = False

    @functools.cached_property
    def schedule(self):
        tile, alone = rank_tile(max(self.ranks)), len(set(self.columns)) > 1
        width = sum(its for _, its in set(self.columns))
        schedule = shrink_schedule(self.as_of or self.rows, self.ranks, tile, width, alone)
        return dataclasses.replace(schedule, programs=PROGRAMS, stages=self.stages)

    @property
    def columns(self):
        """The span of each rank."""
        return self.spans or ((0, self.k),) * len(self.ranks)

    @functools.cached_property
    def compiled(self):

        @jax.jit
        def shrink(x, tables, factors, scalings):
            return shrink_kernel(
                x,
                tables,
                factors,
                scalings,
                self.firsts,
                tuple(start for start, _ in self.columns),
                self.schedule,
                interpreted=True,
            )

        return shrink

    def arguments(self, group_sizes, row_slots, seed=0):
        rng = np.random.default_rng(seed)
        x = normal(rng, self.rows, self.k)
        x[(groups_of_rows(group_sizes, self.rows) < 0) | (row_slots < 0)] = np.nan
        shared = self.shared or (False,) * len(self.ranks)
        terms = [
            Term(0, width, *term)
            for (_, width), *term in zip(self.columns, self.ranks, shared, strict=True)
        ]
        shapes = [term.factor_shape(self.slots, self.groups) for term in terms]
        factors = tuple(normal(rng, *shape) for shape in shapes)
        scalings = tuple(
            rng.standard_normal(factor.shape[:2]).astype(np.float32) for factor in factors
        )
        return x, group_sizes, row_slots, factors, scalings

    def run(self, x, group_sizes, row_slots, factors, scalings):
        """u of each term, and the zeros that follow each: what a product reads."""
        tables = tables_of(self.groups)(group_sizes, row_slots)
        if self.schedule.block is None:
            tables = dataclasses.replace(tables, pieces=pieces_of(tables))
        if self.layered:
            factors, scalings = in_layers((factors, scalings))
        u = interpret(self.compiled, x, tables, factors, scalings)
        _, owned = packed_columns(self.ranks, self.schedule.rank_tile)
        parts = u[: len(owned)]
        return tuple(
            its.array[:, its.first : its.first + size]
            for its, size in zip(parts, owned, strict=True)
        )

    def expect(self, *arguments):
        starts = tuple(start for start, _ in self.columns)
        x, group_sizes, row_slots, factors, scalings = arguments
        return definition.shrink(x, group_sizes, row_slots, factors, starts, scalings)


def pieces_of(tables):
    """Some pieces of so few rows that the tables have none; see `gpu_rows.Pieces`."""
    place = np.asarray(tables.place)
    row = np.arange(len(place))
    starts = (place != np.roll(place, 1)) | (row % 24 == 0)
    found = np.flatnonzero(starts & (tables.row_slots >= 0)).astype(np.int32)
    numbers = np.array([[len(found)], [np.count_nonzero(tables.row_slots < 0)]], np.int32)
    return gpu_rows.Pieces(numbers[0], np.pad(found, (0, 1)), numbers[1])


@functools.cache
def outer_compiled(columns, spans, dtype):
    @jax.jit
    def outer(left, right, runs):
        return outer_kernel(left, columns, right, spans, runs, dtype, interpreted=True)

    return outer


def outer(left, columns, right, spans, runs, dtype):
    """`outer_kernel` in few programs, with as many features in a unit as suit the spans."""
    with mock.patch.multiple(gpu_outer, PROGRAMS=PROGRAMS, TURNS=0):
        return interpret(outer_compiled(columns, spans, dtype), left, right, runs)


@functools.cache
def shrink_outer_compiled(columns, spans, tile, chunk):
    @jax.jit
    def shrink_outer(left, right, runs, factors, scalings):
        arrays = runs, factors, scalings
        return shrink_outer_kernel(left, columns, right, spans, *arrays, tile, interpreted=True)

    return shrink_outer


def shrink_outer(left, columns, right, spans, runs, factors, scalings, tile, chunk):
    """`shrink_outer_kernel` in few programs, with chunks of so many rows."""
    with (
        mock.patch.object(gpu_shrink_outer, "PROGRAMS", PROGRAMS),
        mock.patch.object(gpu_shrink_outer_units, "CHUNK", chunk),
        mock.patch.object(gpu_shrink_outer_units, "PART", 64),
    ):
        compiled = shrink_outer_compiled(columns, spans, tile, chunk)
        return interpret(compiled, left, right, runs, factors, scalings)


def spread_rows(x, position):
    """`spread_rows` in few programs."""
    with mock.patch.object(gpu_spread, "PROGRAMS", PROGRAMS):
        return interpret(jax.jit(gpu_spread.spread_rows), x, position)
