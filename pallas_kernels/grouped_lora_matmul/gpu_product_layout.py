"""The sizes of one Hopper product kernel, and its shared memory."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import implementation
from pallas_kernels.grouped_lora_matmul.gpu_classes import RankClass, rank_classes
from pallas_kernels.grouped_lora_matmul.gpu_product_inner import RANKS, Inner
from pallas_kernels.grouped_lora_matmul.gpu_product_normed import scratch_of
from pallas_kernels.grouped_lora_matmul.gpu_schedule import (
    CHUNK,
    LINE,
    TALL,
    TILES,
    block_rows,
    words_of_rows,
    words_of_tile,
)
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import rank_step
from pallas_kernels.grouped_lora_matmul.gpu_slices import Slices, columns_of_terms
from pallas_kernels.hopper.dependent_launch import begins_early
from pallas_kernels.hopper.memory import overlaid, two_views
from pallas_kernels.hopper.store import transforms_of_lines
from pallas_kernels.layered import is_layered, merged

K_STEP = 64  # columns of one block of a stage: 128 bytes, the widest swizzle
WIDEST_IN_PLACE = 32  # columns of u in a stage: with more, making them zeros takes too long
MOST_BARRIERS = 32  # of one array: Mosaic keeps their phases in the bits of a word


class ProductLayout:
    """Sizes of one kernel, and its memory.

    Args:
      rows: how many there are, where several have the same row of x.
      chosen: whether the kernel itself makes the rows' words, in shared memory.
      norm: of what norms x, see `gpu_product_normed`; None if x is there.
    """

    def __init__(
        self,
        x,
        w,
        terms,
        starts,
        firsts,
        schedule,
        contract,
        gate,
        tables,
        interpreted,
        out_dtype,
        ring_rows=0,
        bias=None,
        rows=None,
        chosen=False,
        norm=None,
    ):
        self.single_rows, self.equal = tables.rows_alone, tables.equal
        self.chosen, self.norm_eps = chosen, norm and norm.eps
        self.interpreted = interpreted
        self.schedule, self.contract, self.gate, self.starts = schedule, contract, gate, starts
        self.parts = 2 if gate is not None else 1
        self.rows, self.k = rows or x.shape[0], x.shape[1]
        self.rows_of_x = self.rows // x.shape[0]
        self.groups = w.shape[0]
        self.width = w.shape[3 - contract] // self.parts
        self.dtype, self.out_dtype = x.dtype, out_dtype
        self.k_steps = pl.cdiv(self.k, K_STEP * schedule.depth)
        self.chunk = min(CHUNK, schedule.heights[-1])
        self.chunks = chunks(schedule.heights, self.chunk)
        self.terms = 0 if terms is None else len(terms.factors)
        self.classes = rank_classes(tuple(dict.fromkeys(firsts)))
        self.ranks = () if terms is None else tuple(f.shape[2] for f in terms.factors)
        self.shared = () if terms is None else tuple(f.shape[1] == 1 for f in terms.factors)
        # Groups and slots of a layer, where an array has those of many.
        factors = () if terms is None else terms.factors
        unmade = () if terms is None else terms.unmade
        self.groups_of_layer = merged(w)[1]
        self.biased = bias is not None
        self.biases_of_layer = merged(bias)[1]
        self.slots_of_layer = tuple(merged(factor)[1] for factor in factors)
        weights = w, bias, norm and norm.weight
        self.layered = any(map(is_layered, (*weights, *factors, *itertools.chain(*unmade))))
        self.widths = () if terms is None else tuple(f.shape[3] for f in terms.factors)
        self.beside = None if terms is None else terms.beside
        self.inner = None
        if unmade and self.beside is None:
            self.inner = Inner(unmade, starts, self.widths, gate is not None)
        columns = (self.width,)
        if self.inner and gate is None:
            columns = columns_of_terms(self.width, starts, self.widths)
        self.slices = Slices.of(columns, schedule.features)
        self.feature_tiles = sum(self.slices.counts)
        # Terms of one shrink are columns of one array: it is passed once, and described once.
        arrays = [] if terms is None else [id(u.array) for u in terms.u]
        self.u_array = tuple(list(dict.fromkeys(arrays)).index(its) for its in arrays)
        self.u_first = () if terms is None else tuple(u.first for u in terms.u)
        if self.beside:
            self.u_array = (0,) * self.terms
            self.u_first = tuple(self.beside.first_columns)
        # Where every program has tiles, all of them make u before.
        self.ahead = self.beside is not None and not self.equal
        self.first_program = 0
        if self.beside and not self.ahead:
            self.first_program = self.beside.schedule.programs
        self.rank_step = rank_step(max(self.ranks)) if terms is not None else 16
        if schedule.features % self.rank_step:
            self.rank_step = 16  # B's tiles in memory are as wide, and a copy begins with one
        self.w_rows, before = self.parts * schedule.features, (0,) * self.terms
        # Rows of W, and of A after it, that follow each other: a block is any 64 of them. Products
        # that have the same ring, one after the other, have as many in a stage.
        self.narrow = schedule.width < 64
        # One by one: of part of a block, rows are not dense together; and of the experts' low tiles
        # each size of a copy would be one more that the host has to describe, which takes the
        # compiler more than in proportion.
        self.stores_rows = self.narrow or ring_rows > 0
        self.by_rows = self.narrow or self.inner is not None or ring_rows > 0
        if self.by_rows:
            used = self.inner.used if self.inner else 0
            own_rows = block_rows(self.w_rows, schedule.width, used, schedule.depth)
            self.block_rows = max(own_rows, ring_rows)
        if self.inner:
            self.rank_step = RANKS
            before = tuple(self.first_rank + first for first in self.inner.first)
        # Copies from before an array are zeros on the hardware; the interpreter has them padded.
        self.ranks_before = (0,) * self.terms if interpreted else before
        self.padded_ranks = before if interpreted else (0,) * self.terms
        self.terms_of_stage = len(self.sets()[0].terms) if self.terms else 0
        # Rows of x in a stage, or of u for each of its terms.
        self.x_rows = schedule.heights[-1]
        # Where in shared memory the words of a tile's rows are.
        self.place = LINE
        self.run_end = LINE + words_of_rows(schedule.heights)
        self.w_copies = 1 if contract == 2 and not interpreted else self.w_rows // 64
        if self.by_rows:
            self.w_copies = self.parts

    @property
    def first_rank(self) -> int:
        """Of the 64 rows of a block that are multiplied for u, the first of A."""
        return self.w_rows - self.first_a_row

    @property
    def first_a_row(self) -> int:
        """The first of these 64."""
        return min(self.w_rows, self.block_rows - 64)

    @property
    def blocks_of_a(self) -> int:
        """Blocks of 64 rows to be multiplied for u alone: none where it is in the last of W's."""
        in_last = self.first_a_row == (self.parts - 1) * self.schedule.width
        return int(not (self.narrow and in_last))

    @staticmethod
    def distinct_u(terms):
        return {id(u.array): u.array for u in terms.u}.values()

    def lora_arrays(self, references) -> LoraArrays:
        """What follows places and run ends among the kernel's operands."""
        references, arrays = list(references), 0 if self.beside else len(set(self.u_array))
        made_here = self.terms if self.inner or self.beside else 0
        counts = arrays, self.terms, made_here, made_here
        return LoraArrays(*([references.pop(0) for _ in range(count)] for count in counts))

    def name(self):
        s = self.schedule
        kind = "gated" if self.gate is not None else "product"
        lora = f"_r{max(self.ranks)}" if self.terms else ""
        lora += "_shrink" if self.inner else "_ahead" if self.ahead else ""
        lora += "_beside" if self.first_program else ""
        lora += f"_c{len(self.classes)}" if len(self.classes) > 1 else ""
        return f"lora_{kind}{lora}_k{self.k}_n{self.width}_f{s.features}_h{s.heights[-1]}"

    def scratch(self):
        s, r = self.schedule, self.rank_step
        b_features = 64 if self.by_rows else s.features
        x_uses = [two_views((s.stages, s.depth, self.x_rows, 64), self.dtype)]
        w_shape = (s.stages, s.depth, self.w_rows // 64, 64, 64)
        whole = (s.stages, s.depth, self.parts, s.features, 64) if self.w_copies == 1 else None
        if self.by_rows:
            w_shape, whole = (s.stages, s.depth, self.block_rows, 64), None
        w_uses = [two_views(w_shape, self.dtype, load_shape=whole)]
        if self.terms and not self.inner:
            u_shape = s.stages, self.runs_of_stage, self.u_rows // self.runs_of_stage, r
            x_uses.append(two_views(u_shape, self.dtype))
        b_shape = (s.stages * self.b_per_stage, r, b_features)
        if self.inner:
            # Copies begin at any feature.
            w_uses.append(two_views(b_shape, self.dtype))
        elif self.terms:
            b_tiles = (plgpu.TilingTransform((8, r)), plgpu.SwizzleTransform(2 * r))
            w_uses.append([plgpu.SMEM(b_shape, self.dtype, transforms=b_tiles)])
        if self.beside:
            for uses, views in zip((x_uses, w_uses), self.beside.stage_views(), strict=True):
                uses.append(views)
        x_stage = overlaid(*x_uses, interpreted=self.interpreted)
        if self.normed:
            x_stage = scratch_of(self.k, self.dtype, self.interpreted)
        scratch = dict(
            x_stage=x_stage,
            w_stage=overlaid(*w_uses, interpreted=self.interpreted),
            out=plgpu.SMEM(
                (s.consumers, s.buffers, self.chunk, 64),
                self.out_dtype,
                transforms=self.out_transforms(),
            ),
            full=plgpu.Barrier(num_arrivals=s.depth * self.stage_copies(), num_barriers=s.stages),
            empty=plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
            tile_words=plgpu.SMEM((TILES, words_of_tile(s.heights)), jnp.int32),
            tile_full=plgpu.Barrier(num_arrivals=max(1, self.word_copies()), num_barriers=TILES),
            tile_empty=plgpu.Barrier(num_arrivals=s.consumers, num_barriers=TILES),
        )
        if self.biased:
            features = self.parts * self.feature_blocks * 64
            scratch["tile_bias"] = plgpu.SMEM((TILES, features), self.dtype)
        if self.terms:
            copies = (self.feature_blocks if self.by_rows else 1) + (0 if self.inner else 1)
            scratch["low_rank_full"] = plgpu.Barrier(
                num_arrivals=copies * self.terms_of_stage,
                num_barriers=s.stages * self.runs_of_stage,
            )
        if self.inner:
            u_shape, swizzle = (s.consumers, self.x_rows, RANKS), plgpu.SwizzleTransform(128)
            u_views = [
                plgpu.SMEM(u_shape, self.dtype, transforms=(plgpu.TilingTransform(tile), swizzle))
                for tile in ((1, 64), (8, 64))
            ]
            scratch["own_u"] = overlaid(u_views, interpreted=self.interpreted)
        if self.beside:
            scratch["shrink"] = self.beside.scratch_beside()
        if self.ahead and self.interpreted:
            scratch["u_said"] = plgpu.Barrier()
        if self.in_place:
            scratch["health"] = plgpu.SMEM((s.consumers, 64), jnp.float32)
            scratch["judged"] = plgpu.Barrier(num_arrivals=s.consumers)
            if self.interpreted:
                scratch["kept_u"] = plgpu.SMEM((s.consumers, *u_shape), self.dtype)
        return scratch

    @property
    def early(self) -> bool:
        """Whether W is loaded while the kernel before still runs.

        That of many layers, which no kernel of a model writes, in tiles that no table names.
        """
        many_layers = self.equal and self.groups_of_layer > 0 and not self.in_place
        return many_layers and begins_early(self.rows)

    @property
    def normed(self) -> bool:
        """Whether the kernel norms x."""
        return self.norm_eps is not None

    @property
    def in_place(self) -> bool:
        """Whether runs are added in place: see `gpu_product_in_place`.

        Where u is wider, or tiles are lower, what it saves is less than what it costs. But where
        registers do not move a consumer has none for a copy of a tall tile's sums.
        """
        if not self.terms or self.inner or self.single_rows or self.x_rows < TALL:
            return False
        is_wide = self.terms_of_stage * self.rank_step > WIDEST_IN_PLACE
        return not (is_wide and implementation.REGISTERS_MOVE)

    @property
    def has_runs(self) -> bool:
        """Whether tiles may have several runs, which are added one after the other."""
        return self.terms > 0 and not (self.single_rows or self.inner or self.in_place)

    @property
    def b_per_stage(self) -> int:
        """Blocks of B, each of a run and a term, that a stage has room for in place of W."""
        rows = self.block_rows if self.by_rows else self.parts * 64
        return self.schedule.depth * rows // self.rank_step

    @property
    def u_rows(self) -> int:
        """Rows of u that a stage has room for in place of x."""
        return self.schedule.depth * self.x_rows * 64 // self.rank_step

    @property
    def runs_of_stage(self) -> int:
        """For how many runs a stage holds B and u."""
        if not self.in_place:
            return 1
        most = min(self.b_per_stage // self.terms_of_stage, MOST_BARRIERS // self.schedule.stages)
        for runs in range(most, 1, -1):
            # They begin where tiles of 8 rows do.
            if self.u_rows % (8 * runs) == 0 and self.u_rows_of_run <= self.u_rows // runs:
                return runs
        return 1

    @property
    def u_rows_of_run(self) -> int:
        return self.terms_of_stage * self.x_rows

    @property
    def feature_blocks(self) -> int:
        """Blocks of 64 features of a tile, or of a part of it when gated."""
        return self.schedule.blocks * self.schedule.consumers

    def stage_copies(self):
        """What is copied for each block of a stage: x, W, and A where u is made here."""
        return int(not self.normed) + self.w_copies + (self.inner.copies if self.inner else 0)

    def out_transforms(self):
        return () if self.narrow else transforms_of_lines(self.out_dtype)

    def word_copies(self):
        """The tile's words in a table, or its row's place; with adapters places and run ends; of
        each part its bias."""
        if self.single_rows:
            words = int(not self.chosen)
        else:
            words = int(not self.equal) + 2 * bool(self.terms)
        return words + (self.parts if self.biased else 0)

    def sets(self) -> list[Set]:
        """What is added after another, of each class: its terms, or all if a stage may hold them.

        It may where a gate has columns for each, or where all cover every column.
        """
        parts = self.terms // len(self.classes)
        cover = all(width == self.width for width in self.widths) and parts * self.rank_step <= 64
        together = parts if self.gate is not None or cover else 1

        def set_of(rank_class, begin):
            steps = pl.cdiv(max(self.ranks[begin : begin + together]), self.rank_step)
            return Set(rank_class, tuple(range(begin, begin + together)), steps)

        return [
            set_of(rank_class, number * parts + part)
            for number, rank_class in enumerate(self.classes)
            for part in range(0, parts, together)
        ]

    def steps_of(self, its: Set, feature, slot):
        """Rank steps of a set for rows of a slot, in a tile that starts at a feature.

        No step where the slot is of another class, or the terms are of other columns.
        """
        steps = its.rank_class.select(slot, its.steps, 0)
        start, width = self.starts[its.terms[0]], self.widths[its.terms[0]]
        if self.gate is not None or (start == 0 and width == self.width):
            return steps
        apart = (feature >= start + width) | (feature + self.schedule.features <= start)
        return jnp.where(apart, 0, steps)

    def places_of_part(self, part):
        """Which of a stage's terms add to an accumulator part."""
        if self.gate is None:
            return range(self.terms_of_stage)
        terms = range(self.terms_of_stage)
        return [term for term in terms if (self.starts[term] > 0) == (part > 0)]


class LoraArrays(NamedTuple):
    """A kernel's references to what it needs of adapters.

    Attributes:
      u: the distinct arrays of u. b: the factor of each term.
      a, scalings: of each term, where u is made in this kernel.
    """

    u: list
    b: list
    a: list
    scalings: list


class Set(NamedTuple):
    """Terms of one class whose products share a stage, and their number of rank steps."""

    rank_class: RankClass
    terms: tuple[int, ...]
    steps: int


class Piece(NamedTuple):
    """Rows that a tile variant has all of, or none."""

    number: int
    start: int
    width: int


def chunks(heights: tuple[int, ...], size: int) -> list[list[Piece]]:
    """The pieces of a tile, cut at the heights of its variants, in chunks of `size` rows.

    None is wider than the lowest variant, whose accumulator stands for the pieces it lacks.
    """
    steps = (range(step, heights[-1], step) for step in (size, heights[0]))
    ends = sorted({*heights, *itertools.chain(*steps)})
    starts = [0, *ends[:-1]]
    pieces = [
        Piece(number, start, end - start)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    return [
        [piece for piece in pieces if piece.start // size == chunk]
        for chunk in range(pl.cdiv(heights[-1], size))
    ]
