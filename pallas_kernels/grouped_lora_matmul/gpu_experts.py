"""Gate, up and down of rows that are a tile each, as one kernel: the experts of one token.

Each program has its tiles of gate and up, then those of down. All of down's need all that gate and
up made, so programs wait for each other between; meanwhile W of down is on its way.

    load W of gate and up   | load W of down, as much as stages hold | load h
    multiply, gate, store h | say so                  wait for all   | multiply, store

Both are the products of `gpu_product`, tile by tile, with one ring of stages. u of gate and up is
made by programs without tiles if there are some (`gpu_product_beside`), else in every tile, as u of
down is (`gpu_product_inner`).
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.gpu_product import Terms, operands_of
from pallas_kernels.grouped_lora_matmul.gpu_product_beside import ShrinkBeside
from pallas_kernels.grouped_lora_matmul.gpu_product_compute import ProductConsumer
from pallas_kernels.grouped_lora_matmul.gpu_product_layout import ProductLayout, Stages
from pallas_kernels.grouped_lora_matmul.gpu_product_memory import ProductMemory
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables
from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILES, ProductSchedule
from pallas_kernels.grouped_lora_matmul.gpu_tiles import TileFeed
from pallas_kernels.hopper.arrivals import Arrivals
from pallas_kernels.hopper.memory import drain, overlaid
from pallas_kernels.hopper.store import whole_lines
from pallas_kernels.layered import layer_of

COMMON = "x_stage", "w_stage", "empty"  # what the products have in turns


class Product(NamedTuple):
    """One of the two: W `[G, N, K]`, its terms or None, their first columns, the schedule."""

    w: jax.Array
    terms: Terms | None
    starts: tuple[int, ...]
    schedule: ProductSchedule


def experts_kernel(
    tables: Tables, x, into: Product, out: Product, gate: Gate, ring_rows: int, *, interpreted=False
):
    """Runs both products.

    Args:
      tables: of rows that are a tile each, whose `arrivals` it uses up. x: [M, K].
      into: of gate and up. out: of down. Both have terms, whose u they make, or none has.
      ring_rows: see `experts_schedules`. interpreted: for the interpreter, which knows no layouts.

    Returns:
      [M, N of down] in x's dtype.
    """
    h = jax.ShapeDtypeStruct((x.shape[0], into.w.shape[1] // 2), x.dtype)

    def layout_of(x, product, gate):
        w, terms, starts, schedule = product
        firsts = (0,) * len(starts)
        lora = terms, starts, firsts, schedule
        static = gate, tables, interpreted, x.dtype, ring_rows
        return ProductLayout(x, w, *lora, 2, *static)

    layouts = layout_of(x, into, gate), layout_of(h, out, None)
    makers = layouts[0].first_program
    out_type = [
        jax.ShapeDtypeStruct((x.shape[0], whole_lines(layout.width, 64)), x.dtype)
        for layout in layouts
    ]
    if makers:
        out_type.append(jax.ShapeDtypeStruct((x.shape[0], layouts[0].beside.columns), x.dtype))
    kernel = plgpu.kernel(
        functools.partial(_body, layouts),
        out_type=out_type,
        grid=(makers + max(product.schedule.programs for product in (into, out)),),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=_scratch(layouts),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,  # no sum crosses warps
        ),
        kernel_name=f"lora_experts_of_{layouts[0].name()}",
    )
    operands = (
        operands_of(layout, product.w, product.terms)
        for layout, product in zip(layouts, (into, out), strict=True)
    )
    of_adapters = into.terms.of_adapters + out.terms.of_adapters if into.terms else ()
    layer = layer_of(into.w, out.w, *of_adapters)
    layers = () if layer is None else (layer,)
    words = () if interpreted else tables.arrivals
    rows = (tables.place, tables.run_end) if into.terms else (tables.place,)
    _, y, *_ = kernel(*layers, *words, *rows, x, *itertools.chain(*operands))
    return y[:, : layouts[1].width]


def _scratch(layouts: tuple[ProductLayout, ProductLayout]):
    into, out = (layout.scratch() for layout in layouts)
    uses = zip(*(layout.stage_uses() for layout in layouts), strict=True)
    rings = [overlaid(*first, *then, interpreted=layouts[0].interpreted) for first, then in uses]
    common = dict(zip(COMMON, (*rings, into["empty"]), strict=True))
    own = [{name: its[name] for name in its if name not in COMMON} for its in (into, out)]
    # The interpreter knows no waiting for other programs: all tiles are one's.
    barrier = dict(made=plgpu.Barrier()) if layouts[0].interpreted else {}
    return common | dict(into=own[0], out=own[1]) | barrier


def _body(layouts: tuple[ProductLayout, ProductLayout], *refs, into, out, made=None, **common):
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    refs, first = list(refs), layouts[0]
    layer = refs.pop(0)[0] if first.layered else jnp.int32(0)
    words = (None, None) if first.interpreted else (refs.pop(0), refs.pop(0))
    rows = refs.pop(0), refs.pop(0) if first.terms else None
    u = refs.pop() if first.beside else None
    y, h = refs.pop(), refs.pop()
    x, *operands = refs
    count = 1 + 3 * first.terms  # W; B, A and the scaling of each term
    into, out = (
        _Phase(layout, program - first.first_program, layer, rows, *arguments)
        for layout, *arguments in zip(
            layouts,
            ((x, h), (h, y)),
            (operands[:count], operands[count:]),
            (into, out),
            _rings(layouts, common),
            strict=True,
        )
    )
    all_made = _AllMade(into, made, words[0])
    beside = into.shrink_beside(program, u, words[1]) if first.beside else None

    @pl.when(warpgroup == 1)
    def _memory():
        if beside:
            beside.load()
        steps = into.load(jnp.int32(0), beside, None)
        steps = out.load(steps, None, all_made.wait)
        drain(common["empty"], steps, first.schedule.stages)
        into.drain()
        out.drain()

    @pl.when(warpgroup == 0)
    def _compute():
        if beside:
            beside.compute()
        steps = into.compute(jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
        all_made.say()
        out.compute(steps)
        # Read is enough: the kernel's end makes what was stored visible.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _rings(layouts, common):
    """What each product has of the memory of stages: its views of the rings, and the barriers."""
    rings = [list(common[name]) for name in ("x_stage", "w_stage")]
    for layout in layouts:
        counts = [
            len(uses) if layout.interpreted else sum(map(len, uses)) for uses in layout.stage_uses()
        ]
        x, w = (ring[:count] for ring, count in zip(rings, counts, strict=True))
        rings = [ring[count:] for ring, count in zip(rings, counts, strict=True)]
        yield dict(x_stage=x, w_stage=w, empty=common["empty"])


class _Phase:
    """One of the products, in a program.

    Args:
      number: among the programs that have tiles; those before the first have none.
      rows: the place and run end of each. arrays: x and y. operands: W and what adapters have.
      own, ring: the memory of this product alone, and what it has of that of stages.
    """

    def __init__(self, layout: ProductLayout, number, layer, rows, arrays, operands, own, ring):
        s, self.rows = layout.schedule, rows
        self.makes_some = (number >= 0) & (number < s.programs)
        number, total = jnp.maximum(number, 0), layout.rows * layout.feature_tiles
        count = lax.div(total - number + (s.programs - 1), jnp.int32(s.programs))
        count = jnp.where(self.makes_some, count, 0)
        words = (own[name] for name in ("tile_words", "tile_full", "tile_empty"))
        self.feed = TileFeed(layout, number, count, rows[0], *rows, *words)
        barriers = {name: own[name] for name in ("full", "low_rank_full", "own_u") if name in own}
        self.stages = Stages(layout, **ring, **barriers)
        self.layout, self.layer, (self.x, self.y), self.own = layout, layer, arrays, own
        self.w, *lora = operands
        self.lora = layout.lora_arrays(lora)

    def shrink_beside(self, program, u, word) -> ShrinkBeside:
        """What makes u, and is to be loaded from it."""
        self.lora.u.append(u)
        views = zip(("x_views", "a_views"), self.stages.of_shrink, strict=True)
        scratch, rows = dict(views) | self.own["shrink"], (self.x, *self.rows, u)
        lora = self.lora.a, self.lora.scalings
        return ShrinkBeside(self.layout.beside, program, self.layer, rows, *lora, scratch, word)

    def load(self, step, beside, wait_for_x):
        arrays = self.x, self.w, self.lora, self.layer
        memory = ProductMemory(
            self.feed, self.stages, *arrays, beside=beside, wait_for_x=wait_for_x
        )
        return memory.load_tiles(None, step)[1]

    def compute(self, step):
        arrays = self.lora, self.layer, self.own["out"], self.y
        consumer = ProductConsumer(self.feed, self.stages, *arrays, jnp.int32(0), None)
        return consumer.compute_tiles(None, step)

    def drain(self):
        if self.layout.word_copies():
            drain(self.feed.empty, self.feed.count, TILES)


class _AllMade:
    """Word of every program that its part of h is in memory.

    Args:
      barrier: in place of the word, for the interpreter.
    """

    def __init__(self, into: _Phase, barrier, word):
        self.makes_some, self.count = into.makes_some, into.layout.schedule.programs
        self.barrier, self.arrivals = barrier, None if barrier is not None else Arrivals(word)

    def say(self):
        if self.arrivals:
            pl.when(self.makes_some)(self.arrivals.arrive)
        else:
            plgpu.barrier_arrive(self.barrier)

    def wait(self):
        if self.arrivals:
            self.arrivals.wait(self.count)
        else:
            plgpu.barrier_wait(self.barrier)
