"""The Hopper kernel of paged attention: one pass over a request's cache, in order of position.

A unit is a tile of tokens of one request and the query heads that share keys and values: 64 rows of
(token, head), which read the cache once together; at prefill two tiles, each with a warpgroup of
its own. Grouped heads and latents differ only in what a position's columns are: lines of 64, of
which the first are keys and some (the latent's own, or those after the keys) are values.

    for each block of 64 positions:
        S = Q · Kᵀ                 [64 rows, 64 positions]
        P = exp2(S - maximum)      rounded to the cache's dtype
        O = O · correction + P · V

Every row's numbers are its own: blocks come in order of position from the first, and one that lies
wholly past a row's position (or before its window) changes no bit of it. So bits do not depend on
the tile, the chunk or the batch. Values of positions that no row of the tile sees are set to zero,
as they may be anything, and 0 x NaN is NaN.

Sums begin anew at every multiple of the split's size, and are joined in order (`gpu_join.py`). In a
large batch a program has all of a unit's sequence and joins as it goes. In a small one units are
runs of splits, as many as there are programs; they store each split's sums, and a second kernel
joins them. Both do the same to a row, so bits do not depend on which it is, either. A tile that
sees one split has its result from the program that has it.

A sink is a score without a value: joining begins with it in place of nothing.

With many columns of values (latents) two warpgroups have half of O's columns each, and take blocks
in pairs (`gpu_partners.py`). They keep the sums before a split in memory.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import drain, overlaid, two_views
from pallas_kernels.hopper.store import whole_lines
from pallas_kernels.paged_attention.gpu_consumer import Consumer
from pallas_kernels.paged_attention.gpu_join import join_kernel
from pallas_kernels.paged_attention.gpu_loading_consumer import LoadingConsumer
from pallas_kernels.paged_attention.gpu_loading_partners import LoadingPartner
from pallas_kernels.paged_attention.gpu_partners import Partner
from pallas_kernels.paged_attention.gpu_sizes import BLOCK, LINE, ROWS, Sizes
from pallas_kernels.paged_attention.gpu_splits import (
    memory_before,
    memory_of_sums,
    sinks_of_rows,
)
from pallas_kernels.paged_attention.gpu_units import Loader, unit_at
from pallas_kernels.paged_attention.tiles import first_of_tile, split_runs, token_tiles


def attention_kernel(sizes: Sizes, q, caches, view, sinks=None):
    """Attends.

    Args:
      q: [T, H, columns of all keys]. caches: [P, page, heads of the cache, columns], one for each
        of the sizes' lines. sinks: [H] where the sizes say so.

    Returns:
      [T, H, columns of the values] in q's dtype.
    """
    positions = view.page_tables.shape[1] * sizes.page
    s = sizes.spread_over(positions, PROGRAMS)
    tiles, units = token_tiles(view, s.unit), s.tokens * s.parts
    if s.spread:
        most = PROGRAMS // s.parts
        tiles, units = split_runs(tiles, s.split, s.window, s.spread, most), most * s.parts
    programs = min(PROGRAMS, units)
    one_split = s.splits(positions) == 1
    shape = (s.tokens, s.heads) if s.boxes else (s.parts, s.tokens * s.group)
    if not s.boxes:
        q = q.reshape(s.tokens, s.parts, s.group, -1).swapaxes(0, 1).reshape(*shape, -1)
    columns = s.value_lines * LINE
    if s.spread:
        columns = whole_lines(columns, LINE)  # those of sums, with which results are joined
    results = [jax.ShapeDtypeStruct((*shape, columns), q.dtype)]
    if s.spread:
        results += memory_of_sums(s)
    elif s.consumers > 1 and not one_split:
        results.append(memory_before(s, programs))
    kernel = kept_kernel(
        functools.partial(_body, s, programs, len(caches), one_split),
        out_type=results,
        grid=(programs,),
        grid_names=("program",),
        num_threads=s.warpgroups + s.memory_warpgroup,
        thread_name="warpgroup",
        scratch_types=_scratch(s, q.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=s.name(),
    )
    # One axis for all positions: with pages, a copy would have more axes than the engine takes.
    caches = (cache.reshape(-1, *cache.shape[2:]) for cache in caches)
    sinks = (sinks_of_rows(s, sinks),) if s.sinks else ()
    y, *rest = kernel(*tiles, view.page_tables, q, *caches, *sinks)
    if s.spread:
        y = join_kernel(s, view, first_of_tile(view, s.unit), y, *rest, *sinks, dtype=q.dtype)
    y = y[..., : s.value_lines * LINE]
    if not (s.spread or s.boxes):
        y = y.reshape(s.parts, s.tokens, s.group, -1).swapaxes(0, 1)
    return y.reshape(s.tokens, s.heads, -1)


def _scratch(s: Sizes, dtype):
    """Shared memory and barriers."""
    tiled = (plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(128))
    rows = (s.tile, s.group) if s.boxes else (ROWS,)
    scratch = dict(
        # The result takes the place of the queries.
        q_stage=[
            overlaid(
                *(
                    two_views((lines, ROWS, LINE), dtype, load_shape=(lines, *rows, LINE))
                    for lines in (s.key_lines, s.value_lines)
                ),
                interpreted=s.interpreted,
            )
            for _ in range(s.tiles)
        ],
        stages=[
            plgpu.SMEM((s.stages, s.copies(cache), BLOCK, width), dtype, transforms=tiled)
            for cache, width in enumerate(s.widths)
        ],
        q_full=[plgpu.Barrier(num_arrivals=s.key_lines) for _ in range(s.tiles)],
        stored=[plgpu.Barrier(num_arrivals=s.consumers, num_barriers=1) for _ in range(s.tiles)],
        full=[
            plgpu.Barrier(num_arrivals=BLOCK // s.copy * len(piece), num_barriers=s.stages)
            for piece in s.pieces(0)
        ],
    )
    if s.memory_warpgroup or s.consumers == 1:
        empty = plgpu.Barrier(num_arrivals=s.tiles, num_barriers=s.stages)
        scratch["empty"] = [empty for _ in s.pieces(0)]
    if s.spread and s.consumers == 1:
        half = (plgpu.TilingTransform((1, LINE // 2)), plgpu.SwizzleTransform(128))
        scratch["partial"] = plgpu.SMEM((s.value_lines, ROWS, LINE), jnp.float32, transforms=half)
    if s.consumers > 1:
        numbers = plgpu.SMEM((s.consumers, ROWS), jnp.float32)
        scratch |= dict(maxima=numbers, totals=numbers, kept=[numbers, numbers])
        scratch["published"] = plgpu.Barrier(num_barriers=s.consumers)
        scratch["scored"] = plgpu.Barrier(num_arrivals=s.consumers)
    if s.interpreted:
        # The interpreter multiplies only what is in shared memory.
        scratch["weights"] = [plgpu.SMEM((ROWS, BLOCK), dtype) for _ in range(s.warpgroups)]
    if s.tiles > 1:
        scratch["cleared"] = plgpu.Barrier(num_arrivals=s.tiles)
    return scratch


def _body(
    sizes: Sizes,
    programs: int,
    cache_count: int,
    one_split: bool,
    count,
    words,
    page_tables,
    q,
    *refs,
    **scratch,
):
    caches, results = refs[:cache_count], refs[cache_count + sizes.sinks :]
    sinks = refs[cache_count] if sizes.sinks else None
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    wait_for_kernels_before(sizes.tokens)
    if sizes.spread:
        mine = jnp.int32(1)  # a run, which has no splits past the count: nobody waits for that
    else:
        units = count[0] * sizes.parts
        mine = lax.div(units - program + (programs - 1), jnp.int32(programs))
    loader = Loader(sizes, page_tables, caches, scratch["stages"], scratch["full"])

    def unit(i):
        return unit_at(sizes, words, program + i * programs)

    if sizes.memory_warpgroup:

        @pl.when(warpgroup == sizes.warpgroups)
        def _memory():
            if sizes.warpgroups > 1:
                plgpu.set_max_registers(24, action="decrease")

            def load(i, step):
                return loader.load(unit(i), step, scratch["empty"])

            steps = lax.fori_loop(0, mine, load, jnp.int32(0))
            for empty in scratch["empty"]:
                drain(empty, steps, sizes.stages)

    for number in range(sizes.warpgroups):
        kind = _kind_of_consumer(sizes, loader, number)
        consumer = kind(number, sizes, one_split, q, sinks, results, **scratch)

        @pl.when(warpgroup == number)
        def _compute(consumer=consumer):
            if sizes.memory_warpgroup and sizes.warpgroups > 1:
                plgpu.set_max_registers(240, action="increase")
            consumer.run(unit, mine)
            if consumer.part == 0:
                drain(consumer.stored, mine, 1)


def _kind_of_consumer(sizes: Sizes, loader: Loader, number: int):
    """The kind of warpgroup that multiplies."""
    if sizes.consumers == 1:
        loads = not sizes.memory_warpgroup and number == 0
        return functools.partial(LoadingConsumer, loader) if loads else Consumer
    return Partner if sizes.memory_warpgroup else functools.partial(LoadingPartner, loader)
