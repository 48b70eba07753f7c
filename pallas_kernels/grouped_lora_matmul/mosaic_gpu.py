"""`grouped_lora_matmul` on Hopper GPUs: the Mosaic kernels, and what they cannot serve.

The backend interface is described in `differentiable.py`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_lora_matmul import gpu_dispatch, gpu_rows, gpu_spread
from pallas_kernels.grouped_lora_matmul.gpu_experts import Logits, Product, Shrink, experts_kernel
from pallas_kernels.grouped_lora_matmul.gpu_outer import outer_kernel
from pallas_kernels.grouped_lora_matmul.gpu_product import Terms, product_kernel
from pallas_kernels.grouped_lora_matmul.gpu_product_inner import RANKS, Inner, Unmade
from pallas_kernels.grouped_lora_matmul.gpu_product_normed import UNIT as NORM_UNIT
from pallas_kernels.grouped_lora_matmul.gpu_product_normed import Norm, normed_bytes
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables
from pallas_kernels.grouped_lora_matmul.gpu_schedule import (
    BYTES_BESIDE,
    ProductSchedule,
    experts_schedules,
    experts_schedules_of_tiles,
    is_read_again,
    product_schedule,
    shrink_ahead,
    shrink_beside,
)
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Columns, shrink_kernel
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import ShrinkLayout, widest_ranks
from pallas_kernels.grouped_lora_matmul.gpu_shrink_outer import STAGES, shrink_outer_kernel
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import (
    BLOCKS_OF_ROWS,
    packed_columns,
    rank_step,
    rank_tile,
    shrink_of_spread,
    shrink_of_tiles,
    shrink_schedule,
)
from pallas_kernels.grouped_lora_matmul.gpu_slices import columns_of_terms
from pallas_kernels.grouped_lora_matmul.gpu_spread_shrink import spread_and_shrink
from pallas_kernels.grouped_lora_matmul.lora import Lora, classes_of
from pallas_kernels.hopper.machine import runs_all_programs_at_once
from pallas_kernels.implementation import serves
from pallas_kernels.layered import is_layered
from pallas_kernels.routing_plan import gpu_combine
from pallas_kernels.routing_plan.api import local_groups
from pallas_kernels.top_experts import mosaic_gpu as top_experts

READS_LAYERS = True
NORMED_ROWS = 1
EXPERTS_AT_ONCE = gpu_rows.FEW_ROWS
ROUTED_AT_ONCE = gpu_rows.UNSORTED_ROWS
SHRINKS_WITH_OUTER = True
LEAST_BUCKETS = 64  # of a kernel whose unit is a bucket: fewer leave half of the programs idle
MOST_CHOSEN = 2  # tokens: each program chooses for one after the other
MOST_BYTES_OF_NORM = 64 * 1024  # of shared memory, for one row: more would be stages less
MAX_RANK = 128
MAX_BLOCKS = MAX_RANK // 64  # of one shrink: with more, its ring has no second stage


def check(x, w, lora, parts, out_dtype=None):
    """Raises NotImplementedError, with the shapes, for what the kernels cannot serve."""
    pairs = [pair for entry in lora for pair in classes_of(entry)]

    def refuse(why: str):
        ranks = [pair.a.shape[2] for pair in pairs]
        raise NotImplementedError(
            f"mosaic_gpu: {why} (x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, "
            f"{parts=}, {ranks=})"
        )

    arrays = (x, w, *(array for pair in pairs for array in (pair.a, pair.b)))
    if any(array.dtype != jnp.bfloat16 for array in arrays):
        refuse("x, w and adapters must be bfloat16")
    if x.shape[0] == 0:
        refuse("there must be at least one row")
    if x.shape[1] % 8 or any(width % 8 for width in parts):
        refuse("K and every part of N must be multiples of 8, the copy engine's unit")
    if x.shape[1] > gpu_spread.MAX_WIDTH:
        refuse(f"K goes up to {gpu_spread.MAX_WIDTH}")
    # Features of a tile are of one part, and B is copied in tiles of as many as a step has ranks.
    unit = 64 if len(parts) > 1 else 32
    if pairs and (x.shape[1] % 64 or any(width % unit for width in parts)):
        refuse("with adapters K, and of several parts of N each, must be multiples of 64, N of 32")
    if any(pair.a.shape[2] > MAX_RANK for pair in pairs):
        refuse(f"ranks go up to {MAX_RANK}")


def tables(group_sizes, row_slots, groups: int) -> Tables:
    """See `gpu_rows.tables`."""
    return gpu_rows.tables(group_sizes, row_slots, groups)


def dispatch(x, groups: int, slots: int, group, token_slots, valid, terms=()):
    """See `differentiable.py`, `gpu_dispatch` and `gpu_rows.plan`."""
    if group.size <= gpu_rows.UNSORTED_ROWS:
        return *gpu_dispatch.dispatch_unsorted(x, groups, group, token_slots, valid), None
    if group.size <= gpu_rows.FEW_ROWS and groups <= gpu_dispatch.MAX_GROUPS:
        return *gpu_dispatch.dispatch_few(x, groups, group, token_slots, valid), None
    plan = gpu_rows.plan(groups, slots, local_groups(group, groups, 0, valid), token_slots)
    found = terms and _spread_and_shrink(x, plan, terms)
    return plan, *(found or (gpu_spread.spread_rows(x, plan.position), None))


def _spread_and_shrink(x, plan, terms):
    """The x of each row, and u of terms; None if one kernel cannot have both."""
    a, _, scalings = (tuple(getattr(term.pair, name) for term in terms) for name in Lora._fields)
    factors, scalings = _whole_factors(a, scalings)
    firsts = tuple(dict.fromkeys(term.first for term in terms))
    ranks = widest_ranks(factors, len(firsts))
    tile, rows, pieces = rank_tile(max(ranks)), plan.token.shape[0], plan.tables.piece_rows
    if x.shape[1] % 64 or len(_packs(range(len(ranks)), ranks, tile)) > 1:
        return None
    schedule = shrink_schedule(rows, ranks, tile, x.shape[1], piece=pieces)
    schedule = shrink_of_spread(schedule, ranks, x.shape[1] * x.dtype.itemsize)
    return schedule and spread_and_shrink(x, plan, factors, scalings, firsts, schedule)


def product(
    x,
    w,
    tables: Tables,
    u,
    factors,
    starts,
    firsts,
    *,
    contract,
    gate=None,
    out_dtype=None,
    bias=None,
    norm: Norm | None = None,
):
    """y = x·W of each row's group, plus the low-rank terms; see `differentiable.py`.

    With a `norm` what `normed_product` gives.
    """
    parts = 1 if gate is None else 2
    width = w.shape[3 - contract] // parts
    out_dtype = out_dtype or x.dtype
    schedule = functools.partial(
        product_schedule,
        x.shape[0],
        w.shape[0],
        width,
        parts,
        out_dtype.itemsize,
        contract,
        equal=tables.equal,
        biased=bias is not None,
        beside=normed_bytes(x.shape[1]) if norm else 0,
    )
    terms = None
    if factors:
        factors = tuple(map(_whole_ranks, factors))
        groups = w.shape[0] if tables.equal else None
        of_terms = u, factors, starts, firsts, gate
        terms, schedule = _terms(x, tables, *of_terms, schedule, groups, width)
    schedule = schedule()
    if norm and (schedule.consumers > 1 or (terms and (terms.beside or not terms.unmade))):
        return None
    lora, static = (terms, tuple(starts), tuple(firsts)), (schedule, contract, gate, out_dtype)
    return product_kernel(tables, x, w, *lora, *static, bias=bias, norm=norm)


def normed_product(
    x, more, weight, eps: float, w, tables, terms, *, gate=None, out_dtype=None, bias=None
):
    """A product of one row, which its kernel norms; see `differentiable.py`.

    None of other rows, of slots of several ranks, and where a row does not fit.
    """
    columns = x.shape[1]
    alone = x.shape[0] == 1 and w.shape[0] == 1 and len({term.first for term in terms}) <= 1
    served = columns % NORM_UNIT == 0 and normed_bytes(columns) <= MOST_BYTES_OF_NORM
    if not (alone and served) or is_layered(weight) != is_layered(w):
        return None
    a, b, scalings = (tuple(getattr(term.pair, name) for term in terms) for name in Lora._fields)
    zeros = firsts = (0,) * len(terms)
    u = shrink_for_product(x, tables, a, zeros, scalings, firsts) if terms else ()
    of_terms = u, b, tuple(term.start for term in terms), firsts
    options = dict(contract=2, gate=gate, out_dtype=out_dtype, bias=bias)
    return product(x, w, tables, *of_terms, **options, norm=Norm(x, more, weight, eps))


def experts(x, gate_up, bias, down, tables: Tables, into, out, gate):
    """Gate, up and down of few rows, in one kernel; see `differentiable.py`.

    None for more rows, for adapters that share the factors which are multiplied once for each
    token, and for ranks that do not fit beside W, or for rank classes of very few rows.
    """
    if tables.arrivals is None or not _has_one_kernel(gate_up, into, out):
        return None
    arguments = x, gate_up, bias, down, tables, into, out, gate
    return (_experts_of_rows if tables.rows_alone else _experts_of_tiles)(*arguments)


def routed_experts(x, logits, tokens, correction, choice, gate_up, bias, down, into, out, gate):
    """Choice, gate, up and down of very few rows, in one kernel; see `differentiable.py`.

    None as of `experts`, of more tokens, and where the choice has no kernel for Hopper.
    """
    if not serves(top_experts.check, logits, choice.top_k):
        return None
    if x.shape[0] > MOST_CHOSEN or not _has_one_kernel(gate_up, into, out):
        return None
    chosen_by = Logits(logits, tokens, correction, *choice)
    tables = gpu_rows.chosen(tokens, choice.top_k)
    return _experts_of_rows(x, gate_up, bias, down, tables, into, out, gate, chosen_by)


def add_choices(residual, rows, weights, dtype):
    """See `differentiable.py` and `gpu_combine`."""
    return gpu_combine.add_choices(residual, rows, weights, dtype)


def _has_one_kernel(gate_up, into, out) -> bool:
    """Whether one kernel may have experts with these adapters, on this GPU."""
    rows_share = [term.pair.a for term in into] + [term.pair.b for term in out]
    alone = all(factor.shape[1] == gate_up.shape[0] for factor in rows_share)
    return alone and bool(into) == bool(out) and runs_all_programs_at_once()


def _experts_of_rows(x, gate_up, bias, down, tables: Tables, into, out, gate, chosen_by=None):
    """Rows that are a tile each: products make u of them."""
    if any(term.first for term in (*into, *out)):
        return None
    width, hidden = gate_up.shape[1] // 2, down.shape[1]
    starts = tuple(term.start for term in into), (0,) * len(out)
    terms, made = [None, None], [0, 0]
    for number, its in enumerate((into, out) if into else ()):
        a, b, scalings = (tuple(getattr(term.pair, name) for term in its) for name in Lora._fields)
        unmade = tuple(map(Unmade, *_whole_factors(a, scalings)))
        terms[number] = Terms((), tuple(map(_whole_ranks, b)), unmade)
        widths = tuple(factor.shape[3] for factor in b)
        made[number] = Inner(unmade, starts[number], widths, number == 0).used
    if max(made) > RANKS:
        return None
    rows = x.shape[0] * (chosen_by.top_k if chosen_by else 1)
    found = experts_schedules(rows, width, hidden, *made, bias is not None, chosen_by is not None)
    if found is None:
        return None
    *schedules, ring_rows = found
    firsts = [(0,) * len(its) for its in starts]
    products = map(Product, (gate_up, down), terms, starts, firsts, schedules, (bias, None))
    return experts_kernel(tables, x, *products, gate, ring_rows, chosen_by=chosen_by)


def _experts_of_tiles(x, gate_up, bias, down, tables: Tables, into, out, gate):
    """Rows in tiles: u of gate and up is made before, that of down in the same kernel."""
    sizes = x.shape[0], gate_up.shape[0], gate_up.shape[1] // 2, down.shape[1], bias is not None
    starts, firsts = (
        [tuple(getattr(term, name) for term in its) for its in (into, out)]
        for name in ("start", "first")
    )
    of_down, terms = None, [None, None]
    if into:
        (a, b, scalings), (a_down, b_down, scalings_down) = (
            tuple(tuple(getattr(term.pair, name) for term in its) for name in Lora._fields)
            for its in (into, out)
        )
        of_down = _shrink_of_tiles(x, down, *_whole_factors(a_down, scalings_down), firsts[1])
        factors = [tuple(map(_whole_ranks, its)) for its in (b, b_down)]
        steps = {rank_step(max(factor.shape[2] for factor in its)) for its in factors}
        if of_down is None or len(steps) > 1:  # stages have ranks of one number
            return None
    found = experts_schedules_of_tiles(*sizes, of_down and of_down.layout.schedule)
    if found is None:
        return None
    *schedules, ring_rows = found
    if into:
        u = shrink(x, tables, a, (0,) * len(a), scalings, firsts[0])
        terms = map(Terms, (u, ()), factors)
    products = map(Product, (gate_up, down), terms, starts, firsts, schedules, (bias, None))
    return experts_kernel(tables, x, *products, gate, ring_rows, of_down)


def _shrink_of_tiles(x, down, factors, scalings, firsts) -> Shrink | None:
    """That of down in the kernel of the experts; None with more ranks than a block has."""
    firsts = tuple(dict.fromkeys(firsts))
    ranks = widest_ranks(factors, len(firsts))
    tile = rank_tile(max(ranks))
    if max(ranks) > 64:
        return None
    h = jax.ShapeDtypeStruct((x.shape[0], down.shape[2]), x.dtype)
    schedule = shrink_of_tiles(tile)
    layout = ShrinkLayout(h, factors, scalings, firsts, (0,), schedule, False)
    return Shrink(factors, scalings, layout)


def _terms(x, tables, u, factors, starts, firsts, gate, schedule, groups: int | None, width: int):
    """The low-rank terms, and the product's schedule as a function, which makes u where it may.

    Args:
      groups: how many of equally many rows there are; None: of others.
      width: features of the product, or of each of its parts.
    """
    if not isinstance(u[0], Unmade):
        return Terms(tuple(u), factors), schedule
    widths = tuple(factor.shape[3] for factor in factors)
    rows = x.shape[0]
    again = groups == 1 < rows and is_read_again(rows, width)
    rows_are_tiles = tables.rows_alone or rows in (1, groups) or again
    if rows_are_tiles and len(set(firsts)) == 1:
        inner = Inner(u, starts, widths, gate is not None)
        columns = () if gate else columns_of_terms(width, starts, widths)
        its_schedule = functools.partial(
            schedule, made_ranks=inner.used, alone=again, columns=columns
        )
        if inner.fits(its_schedule().features):
            return Terms((), factors, tuple(u)), its_schedule
    a, scalings = zip(*u, strict=True)
    its_schedule, made = functools.partial(schedule, beside=BYTES_BESIDE), None
    in_tiles = groups is None and not tables.rows_alone
    if in_tiles or groups == 1:
        parts = 1 if gate is None else 2
        made = _made_in_product(x, a, scalings, firsts, its_schedule(), parts, in_tiles)
    if made is not None:
        return Terms((), factors, tuple(u), made), its_schedule
    return Terms(shrink(x, tables, a, (0,) * len(a), scalings, firsts), factors), schedule


def _made_in_product(
    x, factors, scalings, firsts, product: ProductSchedule, parts_of_w: int, ahead: bool
) -> ShrinkLayout | None:
    """How u of all terms is made in the kernel of their product, if it can be.

    Args:
      ahead: by all of its programs, before their tiles, or beside those that have any.
    """
    firsts = tuple(dict.fromkeys(firsts))
    ranks = widest_ranks(factors, len(firsts))
    tile, parts = rank_tile(max(ranks)), range(len(ranks))
    if len(_packs(parts, ranks, tile)) > 1:
        return None

    def layout(schedule):
        starts = (0,) * len(ranks)
        return ShrinkLayout(x, factors, scalings, firsts, starts, schedule, False)

    alone = layout(shrink_schedule(x.shape[0], ranks, tile, x.shape[1]))
    if ahead:
        w_rows = parts_of_w * product.features
        schedule = shrink_ahead(alone.schedule, alone.a_ranks, product, w_rows)
    else:
        row_units = x.shape[0] * alone.parts_apart
        schedule = shrink_beside(alone.schedule, row_units, alone.a_ranks, product)
    return None if schedule is None else layout(schedule)


def shrink_for_product(x, tables: Tables, factors, starts, scalings, firsts):
    """u of every term, or, of few rows, what a product makes it of."""
    rows = x.shape[0]
    alone = (tables.rows_alone or rows == 1) and len(set(firsts)) == 1
    in_tiles = tables.arrivals is not None and not tables.rows_alone
    ahead = in_tiles and (tables.equal or runs_all_programs_at_once())
    if alone or (ahead and rows <= BLOCKS_OF_ROWS):
        return tuple(map(Unmade, *_whole_factors(factors, scalings)))
    return shrink(x, tables, factors, starts, scalings, firsts)


def _whole_factors(factors, scalings):
    """Factors that kernels can take, and a scaling for each."""
    factors = tuple(map(_whole_ranks, factors))
    scalings = tuple(
        jnp.ones((factor.shape[0], 1), jnp.float32) if scaling is None else scaling
        for factor, scaling in zip(factors, scalings, strict=True)
    )
    return factors, scalings


def shrink(x, tables: Tables, factors, starts, scalings, firsts):
    """u of every term, as `gpu_shrink.Columns`; see `differentiable.py`."""
    factors, scalings = _whole_factors(factors, scalings)
    firsts = tuple(dict.fromkeys(firsts))
    parts = len(factors) // len(firsts)
    columns = [(starts[part], factors[part].shape[3]) for part in range(parts)]
    # A part's classes are in the same columns of u.
    ranks = widest_ranks(factors, len(firsts))
    # Of all parts: a product that takes them in the same steps reads u up to the last one's end.
    tile = rank_tile(max(ranks))
    u = [None] * len(factors)
    # Parts of the same columns of x read them once; those of columns of their own take turns.
    spans = [[i for i, its in enumerate(columns) if its == span] for span in dict.fromkeys(columns)]
    alone = [part for span in spans if len(span) == 1 for part in span]
    for together in (alone, *(span for span in spans if len(span) > 1)):
        for pack in _packs(together, ranks, tile):
            width = sum(its for _, its in {columns[part] for part in pack})
            terms = [first + part for first in range(0, len(factors), parts) for part in pack]
            found = shrink_kernel(
                x,
                tables,
                tuple(factors[term] for term in terms),
                tuple(scalings[term] for term in terms),
                firsts,
                tuple(starts[part] for part in pack),
                shrink_schedule(
                    x.shape[0],
                    tuple(ranks[part] for part in pack),
                    tile,
                    width,
                    together is alone,
                    tables.piece_rows,
                ),
            )
            for term, its in zip(terms, found, strict=True):
                u[term] = its
    return tuple(u)


def _packs(parts, ranks, tile):
    """The parts in as many kernels as their ranks need."""
    packs = []
    for part in parts:
        _, owned = packed_columns([ranks[i] for i in (*(packs[-1] if packs else ()), part)], tile)
        if not packs or sum(owned) > 64 * MAX_BLOCKS:
            packs.append([])
        packs[-1].append(part)
    return packs


def outer(lefts, right, spans, tables: Tables, first: int, shape, dtype):
    """The sums of u[t] ⊗ right[t] over each bucket's rows; see `differentiable.py`."""
    runs = gpu_rows.runs_of_buckets(tables, first, *shape)
    array, columns = _one_array(lefts)
    sums = outer_kernel(array, columns, right, spans, runs, dtype)
    return tuple(its.reshape(*shape, *its.shape[1:]) for its in sums)


def shrink_with_outer(lefts, right, tables: Tables, factors, starts, scalings, firsts):
    """`shrink` and `outer` of many rows in one kernel; see `differentiable.py`.

    None of few rows or buckets, of rank classes, of ranks above 32, and of factors that groups
    share.
    """
    slots, groups = factors[0].shape[:2]
    spans = tuple((start, its.shape[3]) for start, its in zip(starts, factors, strict=True))
    tile = rank_tile(max(factor.shape[2] for factor in factors))
    per_expert = all(its.shape[:2] == (slots, groups) for its in factors) and groups > 1
    of_one_class = len(set(firsts)) == 1 and len(set(spans)) == len(spans)
    many = right.shape[0] > gpu_rows.FEW_ROWS and slots * groups >= LEAST_BUCKETS
    served = per_expert and of_one_class and many and tile in STAGES
    if not served or is_layered(factors[0]):
        return None
    left, columns = _one_array(lefts)
    if any(first // 64 != (first + rank - 1) // 64 for first, rank in columns):
        return None
    runs = gpu_rows.runs_of_buckets(tables, firsts[0], slots, groups)
    arrays = left, columns, right, spans, runs, factors, scalings, tile
    u, sums = shrink_outer_kernel(*arrays)
    ranks = (factor.shape[2] for factor in factors)
    u = tuple(Columns(u, tile * term, rank) for term, rank in enumerate(ranks))
    return u, tuple(its.reshape(slots, groups, *its.shape[1:]) for its in sums)


def _one_array(lefts):
    """All u in one array, so that one kernel reads what they are multiplied with once."""
    arrays = [u.array for u, _ in lefts]
    if all(array is arrays[0] for array in arrays):
        return arrays[0], tuple((u.first, rank) for u, rank in lefts)
    ranks = tuple(rank for _, rank in lefts)
    first, owned = packed_columns(ranks, rank_tile(max(ranks)))
    parts = [
        jnp.pad(jnp.asarray(u)[:, :rank], ((0, 0), (0, width - rank)))
        for (u, rank), width in zip(lefts, owned, strict=True)
    ]
    left = jnp.concatenate(parts, axis=1)
    left = jnp.pad(left, ((0, 0), (0, -left.shape[1] % 64)))
    return left, tuple(zip(first, ranks, strict=True))


def _whole_ranks(factor: jax.Array) -> jax.Array:
    """Ranks that are not multiples of 8, the tensor core's unit, are padded: a copy."""
    if factor.shape[2] % 8 == 0:
        return factor
    return jnp.pad(jnp.asarray(factor), ((0, 0), (0, 0), (0, -factor.shape[2] % 8), (0, 0)))
