"""`grouped_lora_matmul` on TPUs: the Pallas kernels, and what they cannot serve.

The backend interface is described in `differentiable.py`.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_lora_matmul import tpu_schedule, tpu_tasks
from pallas_kernels.grouped_lora_matmul.joined_terms import joined_terms
from pallas_kernels.grouped_lora_matmul.lora import Lora, classes_of
from pallas_kernels.grouped_lora_matmul.tpu_outer import outer_kernel
from pallas_kernels.grouped_lora_matmul.tpu_product import product_kernel
from pallas_kernels.grouped_lora_matmul.tpu_product_layout import Term
from pallas_kernels.grouped_lora_matmul.tpu_schedule import LANES, itemsize
from pallas_kernels.grouped_lora_matmul.tpu_shrink import shrink_kernel
from pallas_kernels.grouped_lora_matmul.tpu_tasks import (
    Route,
    Tables,
    row_runs,
    row_tasks,
    rows_of_slots,
)
from pallas_kernels.routing_plan.api import routing_plan

READS_LAYERS = True
NORMED_ROWS = EXPERTS_AT_ONCE = ROUTED_AT_ONCE = 0
SHRINKS_WITH_OUTER = False
DTYPES = (jnp.bfloat16, jnp.float32)


def check(x, w, lora, parts, out_dtype=None):
    """Raises NotImplementedError, with the shapes, for what the kernels cannot serve:

    - other types than bfloat16 and float32;
    - widths whose tiles do not fit in VMEM. An N that is no multiple of 16 (float32: 8), or a K
      that is none of 128, cannot be cut: on a TPU of 64 MiB, N x K up to about 13 million (float32:
      4 million). Others may have tens of thousands of columns;
    - so many slots of one rank class that the gradients' sums of one group, or of a shared factor,
      do not fit in VMEM (on 64 MiB, slots x ranks up to 52,000; the ranks of A's that are added up
      together count together), or more than 229,000 scalings of slots and groups, which lie in
      scalar memory;
    - more than nine million rows, whose tasks lie there too.
    """
    classes = _classes(lora)
    pairs = [pair for its in classes for pair in its]

    def refuse(why: str):
        ranks = [pair.a.shape[2] for pair in pairs]
        raise NotImplementedError(
            f"mosaic_tpu: {why} (x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, "
            f"{parts=}, {ranks=})"
        )

    arrays = (x, w, *(array for pair in pairs for array in (pair.a, pair.b)))
    if any(array.dtype not in DTYPES for array in arrays):
        refuse("x, w and adapters must be bfloat16 or float32")
    try:
        _schedule_all(x, w, classes, parts, out_dtype)
    except NotImplementedError as error:
        refuse(str(error))


def _classes(lora) -> list[tuple[Lora, ...]]:
    """The pairs of each rank class, part by part."""
    return list(zip(*filter(None, map(classes_of, lora)), strict=True))


def _schedule_all(x, w, classes, parts, out_dtype):
    """Everything that the forward and backward pass schedule; raises what they would."""
    pairs = [pair for its in classes for pair in its]
    device = tpu_schedule.current_device()
    rows, (_, n, k) = max(x.shape[0], 1), w.shape
    # With a shared width the product may be gated: gate and up are two halves.
    halves = (1, 2) if len(parts) == 2 and parts[0] == parts[1] else (1,)
    for count in halves:
        terms = tuple((p.b.shape[2], 0, n // count, itemsize(p.b.dtype)) for p in pairs)
        shape = _shape(x, w, k, n // count, count, 2, terms)
        if out_dtype is not None:
            shape = shape._replace(x_bytes=itemsize(out_dtype))
        tpu_schedule.product_schedule(shape, device)
    terms = tuple((p.a.shape[2], 0, k, itemsize(p.a.dtype)) for p in pairs)
    tpu_schedule.product_schedule(_shape(x, w, n, k, 1, 1, terms), device)
    if not pairs:
        return
    size = itemsize(x.dtype)
    for width, factors in ((k, [p.a for p in pairs]), (n, [p.b for p in pairs])):
        terms = tuple((f.shape[2], f.shape[3], itemsize(f.dtype)) for f in factors)
        tpu_schedule.shrink_schedule(rows, (width,), size, terms, device)
    tpu_schedule.check_scalings(sum(math.prod(pair.scaling.shape) for pair in pairs))
    for its in classes:
        for slots, rank, width in _outers(its):
            tpu_schedule.outer_schedule(rows, slots, rank, width, size, size, device)


def _outers(pairs):
    """Slots, rank and width of one class's gradients' products: of B alone, of A together where the
    slots, groups and dtype are the same."""
    ranks_of_a = {}
    for pair in pairs:
        slots, groups, rank, k = pair.a.shape
        yield slots, rank, pair.b.shape[3]
        kind = slots, groups, k, pair.a.dtype
        ranks_of_a[kind] = ranks_of_a.get(kind, 0) + rank
    for (slots, _, k, _), ranks in ranks_of_a.items():
        yield slots, ranks, k


def _shape(x, w, k, n, halves, contract, terms):
    return tpu_schedule.ProductShape(
        rows=max(x.shape[0], 1),
        k=k,
        n=n,
        halves=halves,
        contract=contract,
        x_bytes=itemsize(x.dtype),
        w_bytes=itemsize(w.dtype),
        terms=terms,
    )


def tables(group_sizes, row_slots, groups: int) -> Tables:
    """See `tpu_tasks.tables`. Equal tables of a layer's products are made once, by the compiler."""
    return tpu_tasks.tables(group_sizes, row_slots, groups)


def dispatch(x, groups: int, slots: int, group, token_slots, valid, terms=()):
    """See `differentiable.py`."""
    del slots, terms
    found = routing_plan(group, token_slots, groups, valid=valid)
    row_tables = tables(found.group_sizes, found.row_slots, groups)
    return Route(found.token, found.position, row_tables), x[found.token], None


def _of_classes(tables: Tables, factors, firsts) -> tuple[Tables, tuple[int, ...]]:
    """Tables in which rows of other slots than the factors' have none, and where each factor's
    slots begin in them. One class is numbered as if there were no others."""
    first = min(firsts)
    ranges = dict.fromkeys((its, f.shape[0]) for its, f in zip(firsts, factors, strict=True))
    return rows_of_slots(tables, first, ranges), tuple(its - first for its in firsts)


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
):
    """y = x·W of each row's group, plus the low-rank terms; see `differentiable.py`.

    The kernel's result has x's dtype: for another one x is converted.
    """
    x = x.astype(out_dtype or x.dtype)
    rows, groups = x.shape[0], w.shape[0]
    halves = 1 if gate is None else 2
    n = w.shape[3 - contract] // halves
    k = w.shape[contract]
    if rows == 0:
        return jnp.zeros((0, n), x.dtype)
    device = tpu_schedule.current_device()
    sizes = tuple(
        (factor.shape[2], start, factor.shape[3], itemsize(factor.dtype))
        for factor, start in zip(factors, starts, strict=True)
    )
    schedule = tpu_schedule.product_schedule(_shape(x, w, k, n, halves, contract, sizes), device)
    if contract == 2:
        w = w.reshape(groups, halves, n, k)
    if bias is not None:
        bias = bias.reshape(groups, halves, n)
    fitted = [
        _fit(factor, start, n, schedule) for factor, start in zip(factors, starts, strict=True)
    ]
    runs = None
    if factors:
        tables, firsts = _of_classes(tables, factors, firsts)
        runs = row_runs(tables, schedule.block_m, by_group=True)
    return product_kernel(
        row_tasks(tables.ends, rows, schedule.block_m),
        runs,
        x,
        w,
        tuple(u),
        tuple(factor for factor, _ in fitted),
        tuple(term for _, term in fitted),
        firsts,
        contract,
        gate,
        schedule,
        device,
        bias,
    )


def _fit(factor, start: int, n: int, schedule):
    """A factor and its term, cut as the column tiles are.

    Where a term's columns start or end inside a tile, or between lanes, its factor is padded with
    zero columns, a copy, and a select keeps them out.
    """
    half, start = divmod(start, n)
    width = factor.shape[3]
    if start + width > n:
        raise NotImplementedError(f"a low-rank term of columns {start} to {start + width} of {n}")
    if tpu_schedule.fits(start, width, n, schedule.n_tiles, schedule.block_n):
        return factor, Term(half, start, width)
    unit = LANES if schedule.n_tiles == 1 else schedule.block_n
    all_columns = schedule.n_tiles * schedule.block_n
    before = start % unit
    after = min(-(start + width) % unit, all_columns - start - width)
    factor = jnp.pad(jnp.asarray(factor), ((0, 0), (0, 0), (0, 0), (before, after)))
    kept = (start, start + width)
    return factor, Term(half, start - before, before + width + after, kept)


def shrink(x, tables: Tables, factors, starts, scalings, firsts):
    """u of every term, in x's dtype; see `differentiable.py`."""
    rows = x.shape[0]
    if rows == 0:
        return tuple(jnp.zeros((0, factor.shape[2]), x.dtype) for factor in factors)
    scalings = tuple(
        jnp.ones((factor.shape[0], 1), jnp.float32) if scaling is None else scaling
        for factor, scaling in zip(factors, scalings, strict=True)
    )
    widths = (factor.shape[3] for factor in factors)
    sources, of_term, columns = _sources(x, tuple(zip(starts, widths, strict=True)))
    device = tpu_schedule.current_device()
    tpu_schedule.check_scalings(sum(math.prod(scaling.shape) for scaling in scalings))
    schedule = tpu_schedule.shrink_schedule(
        rows,
        tuple(source.shape[1] for source in sources),
        itemsize(x.dtype),
        tuple((f.shape[2], f.shape[3], itemsize(f.dtype)) for f in factors),
        device,
    )
    by_group = any(array.shape[1] > 1 for array in (*factors, *scalings))
    tables, firsts = _of_classes(tables, factors, firsts)
    runs = row_runs(tables, schedule.block_m, by_group=by_group)
    scalings = tuple(jnp.asarray(scaling).astype(jnp.float32) for scaling in scalings)
    return shrink_kernel(
        runs, scalings, sources, factors, firsts, of_term, columns, schedule, device
    )


shrink_for_product = shrink  # products take u as it is


def _sources(x, parts):
    """Arrays that have all parts (start, width) of x's columns; which one has each, and from where.

    A copy's or a block's columns start at a lane tile; other parts of x are cut out first, once
    for all rank classes.
    """
    whole = (0, x.shape[1])
    cuts = [whole if start % LANES == 0 else (start, width) for start, width in parts]
    different = list(dict.fromkeys(cuts))
    sources = tuple(x if cut == whole else x[:, cut[0] : sum(cut)] for cut in different)
    of_part = tuple(different.index(cut) for cut in cuts)
    columns = tuple(start - cut[0] for (start, _), cut in zip(parts, cuts, strict=True))
    return sources, of_part, columns


def outer(lefts, right, spans, tables: Tables, first, shape, dtype):
    """The sums of u[t] ⊗ right[t] over each bucket's rows; see `differentiable.py`."""
    tables = rows_of_slots(tables, first, [(first, shape[0])])

    def product(left, start, width):
        return _sums_of_buckets(left, right, start, width, tables, shape)

    return joined_terms(product, lefts, spans, dtype)


def _sums_of_buckets(left, right, start, width, tables: Tables, shape):
    """Σ left[t] ⊗ right[t, start : start + width] of each bucket: float32 [*shape, R, width]."""
    slots, groups = shape
    rows, rank = left.shape
    if rows == 0:
        return jnp.zeros((*shape, rank, width), jnp.float32)
    ends = tables.ends if groups > 1 else tables.ends[-1:]
    device = tpu_schedule.current_device()
    schedule = tpu_schedule.outer_schedule(
        rows, slots, rank, width, itemsize(left.dtype), itemsize(right.dtype), device
    )
    if start % schedule.block_n or schedule.block_n % LANES:
        # Blocks of columns start at multiples of their width: here a copy has to cut them out.
        right, start = lax.slice_in_dim(right, start, start + width, axis=1), 0
    return outer_kernel(
        row_tasks(ends, rows, schedule.block_m, empty_groups=True),
        row_runs(tables, schedule.block_m, by_group=groups > 1),
        left,
        right,
        (start, width),
        shape,
        schedule,
        device,
    )
