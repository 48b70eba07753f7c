"""The Hopper kernel behind every product: y = x·W of each row's group, plus its low-rank terms.

Roles are swapped against a textbook matmul: features are the M side of the tensor core
instruction and rows its N side, which goes in steps of 8. So a tile of any few rows costs about
what its rows cost, and the same kernel serves decode (8 rows a tile) and prefill.

    a tile = F features x up to `heights[-1]` rows of one group
    ring of stages: [ W: F x 64 | x: rows x 64 ]       one k-step (or four, where tiles are few);
                                                       loaded by the memory warpgroup
    after the K loop, the same sums go on over the ranks:
        one adapter in the tile:    [ B: rank x F | u: rows x rank ]
        each run of rows of a slot: [ B: rank x F | u: 32 x rank ]     into a copy of the sums, from
                                                                       which a select takes its rows
                                                       where ranks have classes: as many as the
                                                       slot's class has
                                                       (tall tiles: `gpu_product_in_place`)
    ring of tiles:  [ words of the table | place and run end of each row ]

What a tile is comes through shared memory too: read from global memory, its words would cost the
tensor cores a microsecond before every tile.

Every output element is the sum over K in order, then over the ranks of each term, in one
accumulator, whatever the tile is: bits do not depend on the schedule. A select, not a mask on u,
keeps rows apart: 0 x NaN would not. (In tall tiles a mask does, and what it spoils is done again.)

One warpgroup loads (`gpu_product_memory`), one or two multiply and store (`gpu_product_compute`).
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.gpu_product_ahead import ShrinkAhead, makers
from pallas_kernels.grouped_lora_matmul.gpu_product_beside import ShrinkBeside
from pallas_kernels.grouped_lora_matmul.gpu_product_compute import ProductConsumer
from pallas_kernels.grouped_lora_matmul.gpu_product_in_place import InPlace, is_spoiled
from pallas_kernels.grouped_lora_matmul.gpu_product_inner import Unmade
from pallas_kernels.grouped_lora_matmul.gpu_product_layout import ProductLayout
from pallas_kernels.grouped_lora_matmul.gpu_product_memory import ProductMemory
from pallas_kernels.grouped_lora_matmul.gpu_product_normed import Norm, make_row
from pallas_kernels.grouped_lora_matmul.gpu_product_stages import Stages
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables
from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILES, ProductSchedule
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Columns
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import ShrinkLayout
from pallas_kernels.grouped_lora_matmul.gpu_tile_table import equal_tiles
from pallas_kernels.grouped_lora_matmul.gpu_tiles import TileFeed
from pallas_kernels.hopper.arrivals import Made
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.memory import drain
from pallas_kernels.hopper.store import whole_lines
from pallas_kernels.layered import LAYER_OPERANDS, layer_operands, merged, number_of


class Terms(NamedTuple):
    """The low-rank terms of one product.

    Attributes:
      u: one for each term. factors: one [S, G or 1, R, width] each.
      unmade: in place of u where the kernel makes it.
      beside: how it does, if not as `gpu_product_inner` says: see `gpu_product_beside` of equal
        groups, else `gpu_product_ahead`.
    """

    u: tuple[Columns, ...]
    factors: tuple[jax.Array, ...]
    unmade: tuple[Unmade, ...] = ()
    beside: ShrinkLayout | None = None

    @property
    def of_adapters(self) -> tuple[jax.Array, ...]:
        """All but u."""
        return *self.factors, *itertools.chain(*self.unmade)


def product_kernel(
    tables: Tables,
    x,
    w,
    terms: Terms | None,
    starts: tuple[int, ...],
    firsts: tuple[int, ...],
    schedule: ProductSchedule,
    contract: int,
    gate: Gate | None,
    out_dtype: np.dtype,
    *,
    bias=None,
    norm: Norm | None = None,
    interpreted: bool = False,
):
    """Runs the kernel over the tiles of the table.

    Args:
      x: [M, K]. w: [G, N, K] (contract 2) or [G, K, N] (contract 1). It and the factors may be
        `Layered`.
      starts: the first output column of each term. firsts: the first slot of its factor; terms
        are class by class.
      out_dtype: x's, or float32 where there is no gate.
      bias: [G, N] in x's dtype, or None; it may be `Layered`.
      norm: what x, the only row, is made of; x is its shape then.
      interpreted: for the interpreter, which knows no layouts.

    Returns:
      [M, N] in out_dtype, or [M, N / 2] when gated; of a norm the sum, if there is one, and the
      normed x follow.
    """
    lora = terms, starts, firsts, schedule
    static = contract, gate, tables, interpreted, out_dtype
    layout = ProductLayout(x, w, *lora, *static, bias=bias, norm=norm)
    columns = layout.width if layout.slices.apart else whole_lines(layout.width, schedule.width)
    out_type = [jax.ShapeDtypeStruct((x.shape[0], columns), out_dtype)]
    if layout.beside:
        out_type.append(jax.ShapeDtypeStruct((x.shape[0], layout.beside.columns), x.dtype))
    if norm:
        out_type += [jax.ShapeDtypeStruct(x.shape, x.dtype)] * len(norm.parts)
    kernel = kept_kernel(
        functools.partial(_body, layout),
        out_type=out_type,
        grid=(layout.first_program + schedule.programs,),
        grid_names=("program",),
        num_threads=schedule.consumers + 1,
        thread_name="warpgroup",
        scratch_types=layout.scratch(),
        compiler_params=plgpu.CompilerParams(
            approx_math=gate is None,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # No sum crosses warps, but that of a norm.
            **({} if norm else dict(reduction_scratch_bytes=0)),
        ),
        kernel_name=layout.name(),
    )
    rows, of_adapters = (), ()
    if terms is not None:
        words = (tables.arrivals,) if layout.beside else layout.distinct_u(terms)
        rows = tables.place, tables.run_end, *words
        of_adapters = terms.of_adapters
    layers = layer_operands(w, bias, norm and norm.weight, *of_adapters)
    base, factors = operands_of(layout, w, bias, terms)
    tiles = (tables.place,) if tables.rows_alone else tables.tiles or ()
    x = norm.operands() if norm else x
    y, *found = kernel(*layers, *tiles, x, *base, *rows, *factors)
    y = y[:, : layout.width]
    return (y, *found) if norm else y


def operands_of(layout: ProductLayout, w, bias, terms: Terms | None):
    """W with its bias, if it has one, and what a kernel needs of adapters beside u: arrays of all
    layers, in one axis."""
    if layout.parts == 2:
        w = w.reshape(w.shape[0], 2, layout.width, w.shape[2])
    factors = []
    if terms is not None:
        a = (its.factor for its in terms.unmade)
        factors = [*terms.factors, *a, *(its.scaling.reshape(-1) for its in terms.unmade)]
    base = (w,) if bias is None else (w, bias)
    base, factors = ([merged(its)[0] for its in arrays] for arrays in (base, factors))
    for term, count in enumerate(layout.padded_ranks):
        if count:
            factors[term] = jnp.pad(factors[term], ((0, 0), (0, 0), (count, 0), (0, 0)))
    return base, factors


def _body(
    layout: ProductLayout,
    *refs,
    tile_words,
    tile_full,
    tile_empty,
    out,
    health=None,
    judged=None,
    shrink=None,
    u_said=None,
    tile_bias=None,
    **scratch,
):
    s = layout.schedule
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    wait = functools.partial(wait_for_kernels_before, layout.rows)
    if not layout.early:
        wait()
    count = LAYER_OPERANDS * layout.layered
    layer_refs, refs = refs[:count], refs[count:]
    words = None
    if layout.equal:
        count = equal_tiles(layout.rows, layout.groups, s.rows_of_tile, s.together)
    elif layout.single_rows:
        words, *refs = refs
        count = layout.rows
    else:
        counts, words, *refs = refs
        count = counts[counts.shape[0] - 1]
    if layout.beside:
        *refs, made = refs
    x, *refs = refs
    if layout.normed:
        parts = len(x[0]) - 1  # but for the weight
        refs, normed = refs[:-parts], refs[-parts:]
        stores = program == s.programs - 1
        make_x = functools.partial(make_row, x, layout.norm_eps, stores=stores, results=normed)
    w, *lora, y = refs
    bias = lora.pop(0) if layout.biased else None
    total = count * layout.feature_tiles
    # Those before the first have a shrink, and no tiles.
    number = jnp.maximum(program - layout.first_program, 0)
    mine = lax.div(total - number + (s.programs - 1), jnp.int32(s.programs))
    mine = jnp.where(program < layout.first_program, 0, mine)
    places, run_ends, *lora = lora if layout.terms else (None, None)
    if layout.beside:
        arrivals, *lora = lora
    lora = layout.lora_arrays(lora)
    rings = tile_words, tile_full, tile_empty, bias, tile_bias
    feed = TileFeed(layout, number, mine, words, places, run_ends, *rings)
    stages = Stages(layout, **scratch)
    beside = None
    if layout.beside:
        shrink |= zip(("x_views", "a_views"), stages.of_shrink, strict=True)
        lora.u.append(made)
        rows, of_adapters = (x, places, run_ends, made), (lora.a, lora.scalings, shrink)
        known = layout.beside, program, number_of(layer_refs)
        if layout.ahead:
            words = None if layout.interpreted else arrivals
            made = Made(words, 0, u_said, says=makers(layout.beside), waits=s.programs)
            beside = ShrinkAhead(*known, rows, *of_adapters, made)
        else:
            beside = ShrinkBeside(*known, rows, *of_adapters, arrivals, s.programs)

    def wait_once(tile, is_first):
        del tile
        pl.when(is_first)(wait)

    def set_registers(action, count):
        if s.consumers > 1:
            plgpu.set_max_registers(count, action=action)

    @pl.when(warpgroup == s.consumers)
    def _memory():
        set_registers("decrease", 56 if layout.in_place else 40)
        # On their way together: what either is needed for waits for it alone.
        first, layer = feed.read(0), number_of(layer_refs)
        early = wait_once if layout.early else None
        if layout.ahead:
            beside.load()
            pl.when(mine == 0)(beside.wait)  # who waits is counted
        memory = ProductMemory(feed, stages, x, w, lora, layer, beside=beside, wait_for_x=early)
        judge = functools.partial(is_spoiled, health, judged)
        tiles, steps = memory.load_tiles(first, judge, jnp.int32(0))
        drain(stages.empty, steps, s.stages)
        if layout.word_copies():
            drain(feed.empty, tiles, TILES)

    @pl.when(warpgroup < s.consumers)
    def _compute():
        if layout.early and not layout.normed:
            wait()  # else `make_x` does
        # What the other warpgroup has given back of the 168 that each begins with.
        set_registers("increase", 224 if layout.in_place else 232)
        in_place = InPlace(feed, stages, health, judged, warpgroup) if layout.in_place else None
        layer = number_of(layer_refs)
        if layout.normed:
            its_wait = wait if layout.early else None
            make_x(layer, stages.x_load, wait=its_wait, interpreted=layout.interpreted)
        consumer = ProductConsumer(feed, stages, lora, layer, out, y, warpgroup, in_place)
        if layout.ahead:
            pl.when(warpgroup == 0)(beside.compute)
        consumer.compute_tiles(in_place and in_place.judge, jnp.int32(0))
        # Read is enough: the kernel's end makes what was stored visible.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    if beside and not layout.ahead:
        # A program without tiles has not waited yet.
        waits = wait if layout.early else None
        pl.when(warpgroup == s.consumers)(lambda: beside.load(waits))
        pl.when(warpgroup == 0)(beside.compute)
