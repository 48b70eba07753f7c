"""One token's heads, its place in the cache, and its attention, in one kernel for Hopper.

A program has the query heads that share keys and values, over a split of the sequence (or every so
many of them). It rotates its own queries while keys and values are on their way, so that what was a
kernel before it takes no time; and the program with the last split rotates the new key, stores it
and the new value in their page, and loads the block that they are in only then.

A split is softmax once: its blocks' scores are made one after the other, the weights of all
together, and then the sums block by block. All of its blocks are on their way at once, and what
runs is little code, as code that runs once takes as long as it is long. The sums are those of
`paged_attention/gpu_attention.py`, split by split, and the same kernel joins them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.head_rotation import mosaic_gpu as head_rotation
from pallas_kernels.head_rotation.mosaic_gpu import COLUMNS, Heads, norm_operands
from pallas_kernels.hopper.accumulate import continued
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import overlaid, two_views, views_of
from pallas_kernels.hopper.rolled import rolled
from pallas_kernels.hopper.store import store_registers
from pallas_kernels.paged_attention import mosaic_gpu as paged_attention
from pallas_kernels.paged_attention.gpu_consumer import factor_to, weights_of
from pallas_kernels.paged_attention.gpu_join import join_kernel
from pallas_kernels.paged_attention.gpu_sizes import BLOCK, LINE, ROWS, Sizes, grouped_sizes
from pallas_kernels.paged_attention.gpu_splits import columns_of, memory_of_sums
from pallas_kernels.paged_attention.gpu_units import floor

TOKENS = 1
OF_ROWS, OF_HEADS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
# A warp has 8 rows, one for four threads.
FEW = Heads(
    32,
    plgpu.Layout.TILED(
        plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    ),
)
ROWS_OF_BLOCK = 16  # heads: all blocks of a split are a tile of 64


def check(heads, k_pages, v_pages, view):
    """Raises NotImplementedError if the kernel cannot serve these shapes."""
    head_rotation.check(heads, k_pages, v_pages)
    q = _queries(heads, k_pages)
    paged_attention.check_grouped(q, k_pages, v_pages, view, None)
    if heads.shape[0] != TOKENS or q.shape[1] > ROWS_OF_BLOCK * k_pages.shape[2]:
        raise NotImplementedError(
            f"mosaic_gpu: one token, and at most {ROWS_OF_BLOCK} query heads of a key/value head "
            f"(heads {list(heads.shape)}, k_pages {list(k_pages.shape)})"
        )


def rotated_attention(
    heads,
    q_weight,
    k_weight,
    cos,
    sin,
    k_pages,
    v_pages,
    view,
    eps: float,
    scale: float,
    *,
    interpreted: bool = False,
):
    """See `api.rotated_attention`. `interpreted`: for Pallas's interpreter."""
    q = _queries(heads, k_pages)
    s = _sizes(q, k_pages, v_pages, view, scale, interpreted)
    programs = s.parts * min(s.spread, PROGRAMS // s.parts)
    # One axis for all positions, which are written where they are.
    pages = [jax.new_ref(its.reshape(-1, *its.shape[2:])) for its in (k_pages, v_pages)]
    # Not a kept one: it writes to references, which no exported function takes.
    kernel = plgpu.kernel(
        functools.partial(_body, s, eps, programs // s.parts),
        out_type=memory_of_sums(s),
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=_scratch(s, heads.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"rotated_{s.name()}",
    )
    norms = norm_operands(heads, q_weight, k_weight)
    sums = kernel(norms, heads, cos, sin, view, *pages)
    y = join_kernel(s, view, jnp.zeros(TOKENS, jnp.int32), None, *sums, dtype=heads.dtype)
    shapes = k_pages.shape, v_pages.shape
    pages = [jax.freeze(its).reshape(shape) for its, shape in zip(pages, shapes, strict=True)]
    return y[..., : s.value_lines * LINE], *pages


def _heads(s: Sizes) -> int:
    """Rows of a block: the tensor cores take heads by 8."""
    return -(-s.group // 8) * 8


def _queries(heads, k_pages):
    """The shape of the queries."""
    tokens, count, width = heads.shape
    return jax.ShapeDtypeStruct((tokens, count - 2 * k_pages.shape[2], width), heads.dtype)


def _sizes(q, k_pages, v_pages, view, scale, interpreted) -> Sizes:
    sizes = grouped_sizes(q, k_pages, v_pages, scale, None, False, interpreted)
    positions = view.page_tables.shape[1] * sizes.page
    return dataclasses.replace(sizes, spread=sizes.splits(positions))


def _scratch(s: Sizes, dtype):
    """Shared memory and barriers."""
    tiled = (plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(128))
    heads = two_views((s.key_lines, FEW.count, LINE), dtype)
    return dict(
        arrived=overlaid(heads, interpreted=s.interpreted),
        queries=overlaid(heads, interpreted=s.interpreted),
        stages=[
            plgpu.SMEM((s.rounds, BLOCK, lines * LINE), dtype, transforms=tiled)
            for lines in s.lines
        ],
        shared=dict(
            # Rows that do not begin in the same bank.
            scores=plgpu.SMEM((ROWS, BLOCK + 8), jnp.float32),
            maxima=plgpu.SMEM((2 * ROWS,), jnp.float32),
            weights=plgpu.SMEM((ROWS, BLOCK), dtype, transforms=tiled),
            numbers=plgpu.SMEM((3, ROWS), jnp.float32),
            sums=plgpu.SMEM((_heads(s), s.value_lines * LINE), jnp.float32),
        ),
        heads_full=plgpu.Barrier(num_arrivals=3 * len(COLUMNS)),
        rotated=plgpu.Barrier(),
        empty=[plgpu.Barrier() for _ in s.lines],
        full=[plgpu.Barrier(num_arrivals=BLOCK // s.copy, num_barriers=s.rounds) for _ in s.lines],
    )


def _body(
    s: Sizes, eps, programs,
    norms, heads, cos, sin, view, k_pages, v_pages, *memory,
    arrived, queries, stages, shared, heads_full, rotated, full, empty,
):  # fmt: skip
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    part, first = lax.rem(program, jnp.int32(s.parts)), lax.div(program, jnp.int32(s.parts))
    (load, arrived), (store, queries) = (
        views_of(stage, 2, interpreted=s.interpreted)[0] for stage in (arrived, queries)
    )
    wait_for_kernels_before(TOKENS)

    @pl.when(warpgroup == 1)
    def _memory():
        caches = k_pages, v_pages
        token = _Token(s, view)
        blocks = _Blocks(s, token, part, tuple(zip(caches, stages, full, strict=True)))
        for kind in blocks.kinds:
            blocks.load_before_token(kind, first)
        plgpu.barrier_wait(rotated)

        def load_rest(i, carry):
            split = first + i * programs

            @pl.when(split == token.splits - 1)
            def _new():
                _cache_token(s, token, part, caches, store, load)
                for kind in blocks.kinds:
                    blocks.load(kind, split, token.blocks_of(split) - 1)

            for kind, its in zip(blocks.kinds, empty, strict=True):
                plgpu.barrier_wait(its)
                blocks.load_before_token(kind, split + programs)
            return carry

        lax.fori_loop(0, token.splits_from(first, programs), load_rest, None)

    @pl.when(warpgroup == 0)
    def _compute():
        # Before anything is known of the token.
        _load_heads(s, heads, part, load, heads_full)
        angles = [FEW.over_columns(its.at[0]) for its in (cos, sin)]
        weights = FEW.weights_of_layer(norms)
        nothing = jnp.full((ROWS,), -jnp.inf, jnp.float32)
        shared["maxima"].at[pl.ds(0, ROWS)][...] = plgpu.layout_cast(nothing, OF_ROWS)
        plgpu.barrier_wait(heads_full)
        halves = FEW.normed_and_rotated(FEW.loaded(arrived), weights, angles, s.group, eps)
        for half, its in enumerate(halves):
            rows = queries.at[half, pl.ds(0, FEW.count)]
            store_registers(rows, its.astype(queries.dtype), swizzled=False)
        plgpu.commit_smem()
        plgpu.barrier_arrive(rotated)
        token = _Token(s, view)

        def attend(i, carry):
            split = first + i * programs
            sums = _sums(s, token, split, queries, stages, full, empty, shared)
            _store(s, part, split, sums, memory, shared["sums"])
            return carry

        lax.fori_loop(0, token.splits_from(first, programs), attend, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Sums(NamedTuple):
    """As `gpu_splits.Sums`, but the heads are columns, and values `[64 columns, heads]`."""

    maximum: jax.Array
    total: jax.Array
    values: tuple[jax.Array, ...]


class _Token:
    """Where it is, in whose cache, and how many splits it sees: none if it is padding."""

    def __init__(self, s: Sizes, view):
        self.s, self.page_tables = s, view.page_tables
        request, position = view.request[0], view.positions[0]
        positions = view.page_tables.shape[1] * s.page
        self.request = jnp.maximum(request, 0)
        self.is_cached = (request >= 0) & (position < positions)
        self.position = jnp.minimum(position, positions - 1)
        self.last_block = jnp.where(request >= 0, floor(self.position, BLOCK), -1)
        self.splits = floor(self.last_block + s.rounds, s.rounds)

    def row_of(self, position):
        """Where a position is in the cache; of those past the token's page, where that begins."""
        page_size = self.s.page
        column = jnp.minimum(floor(position, page_size), floor(self.position, page_size))
        page = self.page_tables[self.request, column]
        return page * page_size + lax.rem(position, jnp.int32(page_size))

    def splits_from(self, first, step: int):
        """How many of its splits are every so many from the first on."""
        return lax.div(jnp.maximum(self.splits - first, 0) + (step - 1), jnp.int32(step))

    def blocks_of(self, split):
        """How many blocks of a split it sees."""
        return jnp.minimum(self.last_block + 1 - split * self.s.rounds, self.s.rounds)


class _Blocks(NamedTuple):
    """Keys, and values, of a split, on their way to shared memory.

    Attributes:
      kinds: of both a cache, the memory of a split's blocks, and their barriers.
    """

    s: Sizes
    token: _Token
    part: jax.Array
    kinds: tuple

    def load_before_token(self, kind, split):
        """Loads the blocks of a split that are before the token's."""
        count = self.token.last_block - split * self.s.rounds

        def load(number):
            pl.when(number < count)(lambda: self.load(kind, split, number))

        rolled(0, self.s.rounds, split, load)

    def load(self, kind, split, number):
        s, (cache, stage, full) = self.s, kind
        block = split * s.rounds + number
        for copy in range(BLOCK // s.copy):
            first = pl.multiple_of(self.token.row_of(block * BLOCK + copy * s.copy), s.copy)
            plgpu.copy_gmem_to_smem(
                cache.at[pl.ds(first, s.copy), self.part],
                stage.at[number, pl.ds(copy * s.copy, s.copy)],
                full.at[number],
            )


def _load_heads(s: Sizes, heads, part, target, full):
    """The part's queries, the new key and the new value, row by row."""
    key = s.heads + part
    for half, columns in enumerate(COLUMNS):
        for head, row, count in (
            (part * s.group, 0, s.group),
            (key, s.group, 1),
            (key + s.kv_heads, s.group + 1, 1),
        ):
            rows = target.at[half, pl.ds(row, count)]
            plgpu.copy_gmem_to_smem(heads.at[0, pl.ds(head, count), columns], rows, full)


def _cache_token(s: Sizes, token: _Token, part, caches, rotated, arrived):
    """Stores the new key, which is rotated, and the new value, and waits until they are there."""
    place = token.row_of(token.position)

    @pl.when(token.is_cached)
    def _store():
        for cache, stage, row in zip(
            caches, (rotated, arrived), (s.group, s.group + 1), strict=True
        ):
            for half, columns in enumerate(COLUMNS):
                plgpu.copy_smem_to_gmem(
                    stage.at[half, pl.ds(row, 1)],
                    cache.at[pl.ds(place, 1), part, columns],
                    commit_group=False,
                )
        plgpu.commit_smem_to_gmem_group()

    plgpu.wait_smem_to_gmem(0)


def _sums(s: Sizes, token: _Token, split, queries, stages, full, empty, shared) -> _Sums:
    """The sums of a split, block by block, from the scores of all its blocks.

    Positions and columns of values are the M side of the tensor cores, heads the N side. For
    softmax scores are turned to a tile of rows (block, head), so that its sums are made as those of
    64 rows of one block are.
    """
    (keys, values), (keys_full, values_full) = stages, full
    count = token.blocks_of(split)
    _score(s, token, split, count, queries, keys, keys_full, shared["scores"])
    plgpu.barrier_arrive(empty[0])
    # Rows of blocks that are not seen are anything, and so are their numbers.
    scores = plgpu.load(
        shared["scores"].at[:, pl.ds(0, BLOCK)], layout=plgpu.Layout.WGMMA, optimized=False
    )
    before, maximum = _maxima(s, scores.max(axis=1), shared["maxima"])
    weights = weights_of(scores, maximum)
    shared["weights"][...] = weights.astype(queries.dtype)
    numbers = shared["numbers"]
    of_row = factor_to(maximum, before), weights.sum(axis=1), maximum
    for number, its in enumerate(of_row):
        numbers.at[number][...] = its
    plgpu.commit_smem()
    clear = functools.partial(_clear_unseen, s, token, split, values)
    sums = _add_values(s, count, values, values_full, shared["weights"], numbers, clear)
    plgpu.barrier_arrive(empty[1])
    return sums


def _score(s: Sizes, token: _Token, split, count, queries, keys, full, target):
    """Q · Kᵀ of each block, scaled for powers of two; -inf after the token's position."""

    def score(block, carry):
        def multiply(accumulator):
            for line in range(s.key_lines):
                columns = pl.ds(line * LINE, LINE)
                rows = queries.at[line, pl.ds(0, _heads(s))].T
                plgpu.wgmma(accumulator, keys.at[block, :, columns], rows)
            plgpu.wgmma_wait(0)
            return accumulator[...]

        plgpu.barrier_wait(full.at[block])
        scores = pl.run_scoped(multiply, plgpu.ACC((BLOCK, _heads(s))))
        last = token.position - (split * s.rounds + block) * BLOCK
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        scores = scores * (s.scale * math.log2(math.e))
        scores = jnp.where(row <= last, scores, jnp.full_like(scores, -jnp.inf))
        turned = plgpu.layout_cast(scores, plgpu.Layout.WGMMA_TRANSPOSED)
        rows = target.at[pl.ds(block * ROWS_OF_BLOCK, _heads(s)), pl.ds(0, BLOCK)]
        store_registers(rows.T, turned, swizzled=False)
        return carry

    lax.fori_loop(0, count, score, None)
    plgpu.commit_smem()


def _maxima(s: Sizes, of_block, memory):
    """Of each block and head the maximum of the blocks before, and with its own."""
    ahead = ROWS_OF_BLOCK * (s.rounds - 1)
    memory.at[pl.ds(ahead, ROWS)][...] = of_block
    plgpu.commit_smem()
    before = None
    for distance in range(1, s.rounds):
        rows = pl.ds(ahead - distance * ROWS_OF_BLOCK, ROWS)
        its = plgpu.load(memory.at[rows], layout=OF_ROWS, optimized=False)
        before = its if before is None else jnp.maximum(before, its)
    return before, jnp.maximum(before, of_block)


def _add_values(s: Sizes, count, values, full, weights, numbers, clear) -> _Sums:
    def of_block(number, block):
        rows = pl.ds(block * ROWS_OF_BLOCK, _heads(s))
        return plgpu.load(numbers.at[number, rows], layout=OF_HEADS, optimized=False)

    def add_block(block, state):
        total, sums = state
        plgpu.barrier_wait(full.at[block])
        pl.when(block == count - 1)(lambda: clear(block))
        factor = of_block(0, block)
        total = total * factor + of_block(1, block)
        sums = [its * lax.broadcast_in_dim(factor, shape, [1]) for its in sums]

        def add(accumulators):
            rows = weights.at[pl.ds(block * ROWS_OF_BLOCK, _heads(s))].T
            for line, accumulator in enumerate(accumulators):
                plgpu.wgmma(accumulator, values.at[block, :, pl.ds(line * LINE, LINE)].T, rows)
            plgpu.wgmma_wait(0)

        return total, tuple(continued(sums, add, s.interpreted))

    shape = LINE, _heads(s)
    total = plgpu.layout_cast(jnp.zeros(shape[1:], jnp.float32), OF_HEADS)
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    start = total, (zeros,) * s.value_lines
    total, sums = lax.fori_loop(0, count, add_block, start)
    return _Sums(of_block(2, count - 1), total, sums)


def _clear_unseen(s: Sizes, token: _Token, split, values, block):
    """Zeroes values after the token's position in a block, where there are any."""
    end = token.position + 1 - (split * s.rounds + block) * BLOCK

    @pl.when(end < BLOCK)
    def _clear():
        def clear(line):
            tile = values.at[block, :, columns_of(line)]
            its = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, its.shape, 0, layout=plgpu.Layout.WGMMA)
            tile[...] = jnp.where(row < end, its, jnp.zeros_like(its))

        rolled(0, s.value_lines, split, clear)
        plgpu.commit_smem()


def _store(s: Sizes, part, split, sums: _Sums, memory, buffer):
    """Stores a split's sums in `memory_of_sums`."""
    lines, maxima, totals = memory
    heads = pl.ds(0, _heads(s))
    maxima.at[part, split, heads][...] = sums.maximum
    totals.at[part, split, heads][...] = sums.total
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for line, its in enumerate(sums.values):
        turned = plgpu.layout_cast(its, plgpu.Layout.WGMMA_TRANSPOSED)
        store_registers(buffer.at[:, pl.ds(line * LINE, LINE)].T, turned, swizzled=False)
    plgpu.commit_smem()
    heads = pl.ds(0, s.group)
    plgpu.copy_smem_to_gmem(buffer.at[heads], lines.at[part, split, heads])
