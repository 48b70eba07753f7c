"""Gate, up and down of few rows as one kernel: the experts of a decode step.

Each program has its tiles of gate and up, then those of down. A tile of down needs all of h of its
rows, which other programs made; so these say what is in memory, tile by tile, and it waits for
that. Meanwhile W of down is on its way: memory never rests between the two.

    load W of gate and up   | load W of down, as much as stages hold | load h
    multiply, gate, store h | say so              wait for its rows  | multiply, store

Both are the products of `gpu_product`, tile by tile, with one ring of stages. Rows that are a tile
each make their u inside (`gpu_product_inner`); other rows' u of gate and up is there before, and
that of down two more warpgroups make as soon as its h is there (`gpu_experts_shrink`).

The experts of very few tokens are chosen here as well, if their logits are given: each program
finds for itself which experts its tiles are of (`gpu_experts_choice`).

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
from pallas_kernels.grouped_lora_matmul.gpu_experts_choice import ChoiceLayout, ChosenRows
from pallas_kernels.grouped_lora_matmul.gpu_experts_shrink import ShrinkOfTiles
from pallas_kernels.grouped_lora_matmul.gpu_product import Terms, operands_of
from pallas_kernels.grouped_lora_matmul.gpu_product_compute import ProductConsumer
from pallas_kernels.grouped_lora_matmul.gpu_product_layout import ProductLayout
from pallas_kernels.grouped_lora_matmul.gpu_product_memory import ProductMemory
from pallas_kernels.grouped_lora_matmul.gpu_product_stages import Stages
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables
from pallas_kernels.grouped_lora_matmul.gpu_schedule import TILES, ProductSchedule
from pallas_kernels.grouped_lora_matmul.gpu_shrink import Columns
from pallas_kernels.grouped_lora_matmul.gpu_shrink_layout import ShrinkLayout
from pallas_kernels.grouped_lora_matmul.gpu_tiles import TileFeed
from pallas_kernels.hopper.arrivals import Made
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.memory import drain
from pallas_kernels.hopper.store import whole_lines
from pallas_kernels.layered import layer_operands, merged, number_of
from pallas_kernels.top_experts.xla import Scoring

COMMON = "x_stage", "w_stage", "empty", "own_u"  # what the products have in turns


class Product(NamedTuple):
    """One of the two: W `[G, N, K]`, its terms or None, their first columns and first slots, the
    schedule, and the bias of W or None."""

    w: jax.Array
    terms: Terms | None
    starts: tuple[int, ...]
    firsts: tuple[int, ...]
    schedule: ProductSchedule
    bias: jax.Array | None = None


class Shrink(NamedTuple):
    """How u of down's terms is made: factors `[S, G or 1, R, K]` and scalings of all of them."""

    factors: tuple[jax.Array, ...]
    scalings: tuple[jax.Array, ...]
    layout: ShrinkLayout


class Logits(NamedTuple):
    """What experts are chosen by.

    Attributes:
      logits: [T, E], in order of experts. tokens: int32 [T], the slot of each token + 1; -1: no
        expert works on it.
      correction: float32 [E] of `top_experts`, or None.
    """

    logits: jax.Array
    tokens: jax.Array
    correction: jax.Array | None
    top_k: int
    scoring: Scoring


class _Operands(NamedTuple):
    """What the kernel reads; None, or nothing, is what it has not.

    Attributes:
      layer: see `number_of`. arrivals: those of the tables.
      count: of the tiles, in its last element; words: theirs, or each row's place where every row
        is a tile. places, run_ends: of rows; places of those are words.
      u: that of gate and up's terms. into, out: W and its bias; B, A and the scaling of each term.
      factors, scalings: of the shrink of down.
      logits, tokens, correction: see `Logits`.
    """

    layer: tuple
    arrivals: jax.Array | None
    count: jax.Array | None
    words: jax.Array | None
    places: jax.Array | None
    run_ends: jax.Array | None
    x: jax.Array
    u: tuple
    into: list
    out: list
    factors: list
    scalings: list
    logits: jax.Array | None
    tokens: jax.Array | None
    correction: jax.Array | None


def experts_kernel(
    tables: Tables,
    x,
    into: Product,
    out: Product,
    gate: Gate,
    ring_rows: int,
    shrink: Shrink | None = None,
    chosen_by: Logits | None = None,
    *,
    interpreted=False,
):
    """Runs both products.

    Args:
      tables: of few rows. x: [M, K], or [T, K] of tokens whose experts are chosen here.
      into: of gate and up. out: of down. Both have terms or none has. Where rows are a tile each
        they make their u.
      ring_rows: see `experts_schedules`.
      shrink: of down, whose terms then have no u. None where products make it, and without terms.
      interpreted: for the interpreter, which knows no layouts.

    Returns:
      [M, N of down] in x's dtype. Of experts that are chosen here rows are in order of choices, and
      experts int32 [T, choices] and their weights float32 [T, choices] follow.
    """
    rows, dtype = x.shape[0] * (chosen_by.top_k if chosen_by else 1), x.dtype
    u = ()
    if shrink is not None:
        u = (jax.ShapeDtypeStruct((rows, shrink.layout.columns), dtype),)
        ranks = (factor.shape[2] for factor in shrink.factors)
        found = map(Columns, u * len(shrink.factors), shrink.layout.first_columns, ranks)
        out = out._replace(terms=out.terms._replace(u=tuple(found)))

    def layout_of(x, product, gate):
        lora = product.terms, product.starts, product.firsts, product.schedule
        static = gate, tables, interpreted, dtype, ring_rows
        of_rows = dict(rows=rows, chosen=chosen_by is not None)
        return ProductLayout(x, product.w, *lora, 2, *static, bias=product.bias, **of_rows)

    h = jax.ShapeDtypeStruct((rows, into.w.shape[1] // 2), dtype)
    layouts = layout_of(x, into, gate), layout_of(h, out, None)
    of_h, of_y = (
        jax.ShapeDtypeStruct((rows, whole_lines(layout.width, 64)), dtype) for layout in layouts
    )
    programs, choice, chosen = max(its.schedule.programs for its in layouts), None, ()
    if chosen_by:
        choice = ChoiceLayout(*chosen_by.logits.shape, chosen_by.top_k, chosen_by.scoring, programs)
        chosen = choice.results()
    kernel = kept_kernel(
        functools.partial(_body, layouts, shrink and shrink.layout, choice),
        out_type=[of_h, of_y, *u, *chosen],
        grid=(programs,),
        grid_names=("program",),
        num_threads=4 if shrink else 2,
        thread_name="warpgroup",
        scratch_types=_scratch(layouts, shrink and shrink.layout, choice),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,  # no sum crosses warps
        ),
        kernel_name=f"lora_experts_of_{layouts[0].name()}",
    )
    _, y, *found = kernel(_operands(tables, x, layouts, into, out, shrink, chosen_by))
    y = y[:, : layouts[1].width]
    return (y, *found[-2:]) if chosen_by else y


def _operands(tables: Tables, x, layouts, into: Product, out: Product, shrink, chosen_by):
    of_adapters = into.terms.of_adapters + out.terms.of_adapters if into.terms else ()
    factors, scalings = (shrink.factors, shrink.scalings) if shrink else ((), ())
    of_layers = into.w, into.bias, out.w, out.bias, *of_adapters, *factors, *scalings
    count, words = (None, tables.place) if tables.rows_alone else tables.tiles
    of_into, of_out = (
        list(itertools.chain(*operands_of(layout, product.w, product.bias, product.terms)))
        for layout, product in zip(layouts, (into, out), strict=True)
    )
    logits, tokens, correction, *_ = chosen_by or (None,) * 3
    return _Operands(
        layer=layer_operands(*of_layers),
        arrivals=None if layouts[0].interpreted else tables.arrivals,
        count=count,
        words=words,
        places=tables.place if into.terms and not tables.rows_alone else None,
        run_ends=tables.run_end if into.terms and not tables.rows_alone else None,
        x=x,
        u=tuple(layouts[0].distinct_u(into.terms)) if into.terms else (),
        into=of_into,
        out=of_out,
        factors=[merged(factor)[0] for factor in factors],
        scalings=[merged(scaling.reshape(-1))[0] for scaling in scalings],
        logits=logits,
        tokens=tokens,
        correction=correction,
    )


def _scratch(
    layouts: tuple[ProductLayout, ProductLayout],
    shrink: ShrinkLayout | None = None,
    choice: ChoiceLayout | None = None,
):
    into, out = (layout.scratch() for layout in layouts)
    common = {name: into[name] for name in COMMON if name in into}
    own = [{name: its[name] for name in its if name not in common} for its in (into, out)]
    found = common | dict(into=own[0], out=own[1])
    if choice:
        found["choice"] = choice.scratch()
    if shrink:
        found["shrink"] = shrink.scratch()
    if layouts[0].interpreted:
        found["h_said"] = plgpu.Barrier()
        if shrink:
            found["u_said"] = plgpu.Barrier()
    return found


def _body(
    layouts: tuple[ProductLayout, ProductLayout],
    shrink_layout: ShrinkLayout | None,
    choice_layout: ChoiceLayout | None,
    given: _Operands,
    h,
    y,
    *u,
    into,
    out,
    shrink=None,
    choice=None,
    h_said=None,
    u_said=None,
    **common,
):
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    first, words = layouts[0], given.words
    if choice_layout:
        *u, experts, weights = u
        arrays = given.logits, given.tokens, given.correction, experts, weights
        choice = ChosenRows(choice_layout, program, arrays, **choice)
        words = choice.words
    else:
        wait_for_kernels_before(first.rows)
    count = first.rows if first.single_rows else given.count[given.count.shape[0] - 1]
    rows = count, words, given.places, given.run_ends
    into, out = (
        _Phase(layout, program, given.layer, rows, *arguments, common)
        for layout, *arguments in zip(
            layouts,
            ((given.x, h), (h, y)),
            (given.into, given.out),
            (given.u, u),
            (into, out),
            strict=True,
        )
    )

    made = functools.partial(Made, given.arrivals)
    of_h, of_y = (layout.feature_tiles for layout in layouts)
    if shrink_layout:
        h_made = made(0, h_said, says=of_h, waits=ShrinkOfTiles.WAITS)
        # Who says that there is u has waited for h.
        x_made = u_made = made(first.rows, u_said, says=1, waits=of_y)
    else:
        x_made = h_made = made(0, h_said, says=of_h, waits=of_y)

    @pl.when(warpgroup == 0)
    def _compute():
        if choice:
            choice.make()
        steps = into.compute(jnp.int32(0), h_made.say)
        out.compute(steps, None)
        # Read is enough: the kernel's end makes what was stored visible.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == 1)
    def _memory():
        if choice:
            choice.wait()
        steps = into.load(jnp.int32(0), None)
        steps = out.load(steps, lambda tile, is_first: x_made.wait(tile.number, is_first))
        drain(common["empty"], steps, first.schedule.stages)
        into.drain()
        out.drain()

    def shrink_of_program():
        arrays = h, *u, given.factors, given.scalings
        layer = number_of(given.layer)
        return ShrinkOfTiles(shrink_layout, program, layer, rows, arrays, shrink, h_made, u_made)

    if shrink_layout:
        pl.when(warpgroup == 2)(lambda: shrink_of_program().load())
        pl.when(warpgroup == 3)(lambda: shrink_of_program().compute())


class _Phase:
    """One of the products, in a program.

    Args:
      layer: references to its number, see `number_of`.
      rows: how many tiles of rows there are, and references to their words, and to the place and
        the run end of each row.
      arrays: x and y. operands: W, its bias if it has one, and what adapters have. u: if it has
        been made before.
      own, common: the memory of this product alone, and of both.
    """

    def __init__(
        self, layout: ProductLayout, program, layer, rows, arrays, operands, u, own, common
    ):
        s, (count, *of_rows) = layout.schedule, rows
        total = count * layout.feature_tiles
        count = lax.div(total - program + (s.programs - 1), jnp.int32(s.programs))
        count = jnp.where(program < s.programs, count, 0)
        self.w, *lora = operands
        bias = lora.pop(0) if layout.biased else None
        rings = (own[name] for name in ("tile_words", "tile_full", "tile_empty"))
        rings = *rings, bias, own.get("tile_bias")
        self.feed = TileFeed(layout, program, count, *of_rows, *rings)
        barriers = {name: own[name] for name in ("full", "low_rank_full") if name in own}
        self.stages = Stages(layout, **common, **barriers)
        self.layout, self.layer, (self.x, self.y) = layout, layer, arrays
        self.buffers, self.lora = own["out"], layout.lora_arrays([*u, *lora])

    def load(self, step, wait_for_x):
        # On their way together: behind a barrier, or the compiler has one wait for the other.
        first, layer = self.feed.read(0), number_of(self.layer)
        both = lax.optimization_barrier((first.group, first.place, layer))
        first, layer = first._replace(group=both[0], place=both[1]), both[2]
        arrays = self.x, self.w, self.lora, layer
        memory = ProductMemory(self.feed, self.stages, *arrays, wait_for_x=wait_for_x)
        return memory.load_tiles(first, None, step)[1]

    def compute(self, step, say):
        """`say` is that of `Made`, or None."""

        def say_of(i):
            say(self.feed.number(i)[0], i == self.feed.count - 1)

        arrays = self.lora, number_of(self.layer), self.buffers, self.y
        consumer = ProductConsumer(self.feed, self.stages, *arrays, 0, None, say and say_of)
        return consumer.compute_tiles(None, step)

    def drain(self):
        if self.layout.word_copies():
            drain(self.feed.empty, self.feed.count, TILES)
