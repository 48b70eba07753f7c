"""Gate, up and down of rows that are a tile each, as one kernel: the experts of one token.

Each program has its tiles of gate and up, then those of down. All of down's need all that gate and
up made, so programs wait for each other between; meanwhile W of down is on its way.

    load W of gate and up   | load W of down, as much as stages hold | load h
    multiply, gate, store h | say so                  wait for all   | multiply, store

Both are the products of `gpu_product`, tile by tile, with one ring of stages.

Each program has a multiprocessor of its own, or those that wait would be in the way of those they
wait for. Kernels beside it make it late, no more, unless their programs wait for each other too:
two processes with such kernels cannot share a GPU at the same moment (MPS).
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
from pallas_kernels.grouped_lora_matmul.gpu_product_compute import ProductConsumer
from pallas_kernels.grouped_lora_matmul.gpu_product_layout import ProductLayout, Stages
from pallas_kernels.grouped_lora_matmul.gpu_product_memory import ProductMemory
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables
from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILES, ProductSchedule
from pallas_kernels.grouped_lora_matmul.gpu_tiles import TileFeed
from pallas_kernels.hopper.arrivals import Arrivals
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.memory import drain
from pallas_kernels.hopper.store import whole_lines
from pallas_kernels.layered import LAYER_OPERANDS, layer_operands, number_of

COMMON = "x_stage", "w_stage", "empty", "own_u"  # what the products have in turns


class Product(NamedTuple):
    """One of the two: W `[G, N, K]`, its terms or None, their first columns, the schedule, and the
    bias of W or None."""

    w: jax.Array
    terms: Terms | None
    starts: tuple[int, ...]
    schedule: ProductSchedule
    bias: jax.Array | None = None


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
        w, terms, starts, schedule, bias = product
        firsts = (0,) * len(starts)
        lora = terms, starts, firsts, schedule
        static = gate, tables, interpreted, x.dtype, ring_rows
        return ProductLayout(x, w, *lora, 2, *static, bias=bias)

    layouts = layout_of(x, into, gate), layout_of(h, out, None)
    programs = max(product.schedule.programs for product in (into, out))
    kernel = plgpu.kernel(
        functools.partial(_body, layouts),
        out_type=[
            jax.ShapeDtypeStruct((x.shape[0], whole_lines(layout.width, 64)), x.dtype)
            for layout in layouts
        ],
        grid=(programs,),
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
        itertools.chain(*operands_of(layout, product.w, product.bias, product.terms))
        for layout, product in zip(layouts, (into, out), strict=True)
    )
    of_adapters = into.terms.of_adapters + out.terms.of_adapters if into.terms else ()
    layers = layer_operands(into.w, into.bias, out.w, out.bias, *of_adapters)
    rows = (tables.place, tables.run_end) if into.terms else (tables.place,)
    word = () if interpreted else (tables.arrivals,)
    _, y = kernel(*layers, *word, *rows, x, *itertools.chain(*operands))
    return y[:, : layouts[1].width]


def _scratch(layouts: tuple[ProductLayout, ProductLayout]):
    into, out = (layout.scratch() for layout in layouts)
    common = {name: into[name] for name in COMMON if name in into}
    own = [{name: its[name] for name in its if name not in common} for its in (into, out)]
    # The interpreter knows no waiting for other programs: there is one.
    barrier = dict(made=plgpu.Barrier()) if layouts[0].interpreted else {}
    return common | dict(into=own[0], out=own[1]) | barrier


def _body(layouts: tuple[ProductLayout, ProductLayout], *refs, into, out, made=None, **common):
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    wait_for_kernels_before(layouts[0].rows)
    refs, first = list(refs), layouts[0]
    layer = [refs.pop(0) for _ in range(LAYER_OPERANDS * first.layered)]
    word = None if first.interpreted else refs.pop(0)
    rows = refs.pop(0), refs.pop(0) if first.terms else None
    y, h = refs.pop(), refs.pop()
    x, *operands = refs
    # W and its bias; B, A and the scaling of each term.
    count = 1 + first.biased + 3 * first.terms
    into, out = (
        _Phase(layout, program, layer, rows, *arguments, common)
        for layout, *arguments in zip(
            layouts,
            ((x, h), (h, y)),
            (operands[:count], operands[count:]),
            (into, out),
            strict=True,
        )
    )
    all_made = _AllMade(into, made, word)

    @pl.when(warpgroup == 1)
    def _memory():
        steps = into.load(jnp.int32(0), None)
        steps = out.load(steps, all_made.wait)
        drain(common["empty"], steps, first.schedule.stages)
        into.drain()
        out.drain()

    @pl.when(warpgroup == 0)
    def _compute():
        steps = into.compute(jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
        all_made.say()
        out.compute(steps)
        # Read is enough: the kernel's end makes what was stored visible.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Phase:
    """One of the products, in a program.

    Args:
      layer: references to its number, see `number_of`.
      rows: the place and run end of each. arrays: x and y. operands: W, its bias if it has one, and
        what adapters have.
      own, common: the memory of this product alone, and of both.
    """

    def __init__(self, layout: ProductLayout, program, layer, rows, arrays, operands, own, common):
        s, total = layout.schedule, layout.rows * layout.feature_tiles
        count = lax.div(total - program + (s.programs - 1), jnp.int32(s.programs))
        self.w, *lora = operands
        bias = lora.pop(0) if layout.biased else None
        words = (own[name] for name in ("tile_words", "tile_full", "tile_empty"))
        rings = *words, bias, own.get("tile_bias")
        self.feed = TileFeed(layout, program, count, rows[0], *rows, *rings)
        barriers = {name: own[name] for name in ("full", "low_rank_full") if name in own}
        self.stages = Stages(layout, **common, **barriers)
        self.layout, self.layer, (self.x, self.y) = layout, layer, arrays
        self.buffers = own["out"]
        self.makes_some, self.lora = program < s.programs, layout.lora_arrays(lora)

    def load(self, step, wait_for_x):
        # On their way together: behind a barrier, or the compiler has one wait for the other.
        first, layer = self.feed.read(0), number_of(self.layer)
        both = lax.optimization_barrier((first.group, first.place, layer))
        first, layer = first._replace(group=both[0], place=both[1]), both[2]
        arrays = self.x, self.w, self.lora, layer
        memory = ProductMemory(self.feed, self.stages, *arrays, wait_for_x=wait_for_x)
        return memory.load_tiles(first, None, step)[1]

    def compute(self, step):
        arrays = self.lora, number_of(self.layer), self.buffers, self.y
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
