"""Heads of few tokens, their places in the cache, and their attention, in one kernel for Hopper.

A program has the query heads of a token that share keys and values, over a split of the sequence
(or every so many of them). It rotates its own queries while keys and values are on their way, so
that what was a kernel before it takes no time; and the program with the last split rotates the new
key, stores it and the new value in their page, and loads the block that they are in only then. So
does it with those of other tokens of its sequence, which others store as well, with the same bits.

A split is softmax once: its blocks' scores are made one after the other, the weights of all
together, and then the sums block by block. All of its blocks are on their way at once, and what
runs is little code, as code that runs once takes as long as it is long. The sums are those of
`paged_attention/gpu_attention.py`, split by split, and the same kernel joins them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.head_rotation import mosaic_gpu as head_rotation
from pallas_kernels.head_rotation.gpu_heads import COLUMNS, FEW, norm_operands
from pallas_kernels.hopper.dependent_launch import begins_early, wait_for_kernels_before
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import overlaid, two_views, views_of
from pallas_kernels.hopper.rehearsal import if_real
from pallas_kernels.hopper.store import store_registers
from pallas_kernels.paged_attention import mosaic_gpu as paged_attention
from pallas_kernels.paged_attention.gpu_join import join_kernel
from pallas_kernels.paged_attention.gpu_sizes import BLOCK, LINE, Sizes, grouped_sizes
from pallas_kernels.paged_attention.gpu_splits import memory_of_sums
from pallas_kernels.rotated_attention.gpu_sums import (
    MOST_HEADS,
    Shared,
    store_sums,
    sums_of_split,
)
from pallas_kernels.rotated_attention.gpu_token import Blocks, Token

MOST_TOKENS = 8
# Of a program, one after the other: each is loaded when the one before has been read. With more the
# kernels apart are better, whose loads are further ahead.
MOST_SPLITS = 8


def check(heads, k_pages, v_pages, view):
    """Raises NotImplementedError if the kernel cannot serve these shapes."""
    head_rotation.check(heads, k_pages, v_pages)
    q = _queries(heads, k_pages)
    paged_attention.check_grouped(q, k_pages, v_pages, view, None)
    tokens, kv_heads = heads.shape[0], k_pages.shape[2]
    if not 0 < tokens <= MOST_TOKENS or q.shape[1] > MOST_HEADS * kv_heads:
        raise NotImplementedError(
            f"mosaic_gpu: at most {MOST_TOKENS} tokens, and at most {MOST_HEADS} query heads of a "
            f"key/value head (heads {list(heads.shape)}, k_pages {list(k_pages.shape)})"
        )
    s = _sizes(q, k_pages, v_pages, view, scale=1.0, interpreted=False)
    if s.tokens * s.parts * s.spread > MOST_SPLITS * PROGRAMS:
        raise NotImplementedError(
            f"mosaic_gpu: {tokens} tokens of at most {view.page_tables.shape[1] * s.page} "
            f"positions: a program would have more than {MOST_SPLITS} splits of {s.split}"
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
    units = s.tokens * s.parts
    programs = units * min(s.spread, max(1, PROGRAMS // units))
    # One axis for all positions, which are written where they are.
    pages = [jax.new_ref(its.reshape(-1, *its.shape[2:])) for its in (k_pages, v_pages)]
    # Not a kept one: it writes to references, which no exported function takes.
    kernel = plgpu.kernel(
        functools.partial(_body, s, eps, programs // units),
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
    own_tile = jnp.asarray(np.arange(s.tokens, dtype=np.int32))  # a constant: no kernel
    y = join_kernel(s, view, own_tile, None, *sums, dtype=heads.dtype)
    shapes = k_pages.shape, v_pages.shape
    pages = [jax.freeze(its).reshape(shape) for its, shape in zip(pages, shapes, strict=True)]
    return y[..., : s.value_lines * LINE], *pages


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
        shared=Shared.of(s, dtype),
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
    units, parts = jnp.int32(s.tokens * s.parts), jnp.int32(s.parts)
    unit, first = lax.rem(program, units), lax.div(program, units)
    number, part = lax.div(unit, parts), lax.rem(unit, parts)
    (load, arrived), (store, queries) = (
        views_of(stage, 2, interpreted=s.interpreted)[0] for stage in (arrived, queries)
    )
    caches, early = (k_pages, v_pages), begins_early(s.tokens)

    def kinds_of(token):
        """Keys and values."""
        kinds = zip(caches, stages, full, empty, strict=True)
        return [Blocks(s, token, part, *its) for its in kinds]

    @pl.when(warpgroup == 1)
    def _memory():
        token = Token(s, view, number)
        kinds = kinds_of(token)
        # The kernel before makes no others than this step's.
        for its in kinds:
            its.load_before_step(first)
        wait_for_kernels_before(s.tokens)

        def load_rest(i, carry):
            split = first + i * programs
            pl.when(i == 0)(lambda: plgpu.barrier_wait(rotated))

            before, count = token.blocks_before(split), token.blocks_of(split)

            @pl.when(before < count)
            def _new():
                _cache_tokens(s, token, part, caches, store, load)

                def load_new(block, carry=None):
                    for its in kinds:
                        its.load(split, block)

                if s.tokens == 1:
                    load_new(before)
                else:
                    lax.fori_loop(before, count, load_new, None)

            for its in kinds:
                plgpu.barrier_wait(its.empty)
                its.load_before_step(split + programs)
            return carry

        lax.fori_loop(0, token.splits_from(first, programs), load_rest, None)

    @pl.when(warpgroup == 0)
    def _compute():
        def load_heads():
            wait_for_kernels_before(s.tokens)
            _load_heads(s, heads, number, part, load, heads_full)

        if not early:
            load_heads()
        # Before anything is known of the token.
        angles = [_of_rows(s, number, its) for its in (cos, sin)]
        weights = FEW.weights_of_layer(norms)
        shared.begin()

        def arrived_heads():
            if early:
                load_heads()
            plgpu.barrier_wait(heads_full)
            return FEW.loaded(arrived)

        def rotate(is_real):
            its = if_real(is_real, arrived_heads, FEW.nothing())
            halves = FEW.normed_and_rotated(
                its, weights, angles, s.group, eps, interpreted=s.interpreted
            )
            for half, its in enumerate(halves):
                store_registers(queries.at[half], its.astype(queries.dtype), swizzled=False)
            plgpu.commit_smem()
            pl.when(is_real)(lambda: plgpu.barrier_arrive(rotated))

        if not early:
            rotate(True)
        token = Token(s, view, number)
        keys, values = kinds_of(token)

        def attend(i, carry):
            is_real, split = i >= 0 if early else True, first + i * programs
            if early:
                pl.when(i <= 0)(lambda: rotate(is_real))
            blocks = jnp.where(is_real, token.blocks_of(split), 0)
            sums = sums_of_split(s, token, split, blocks, queries, keys, values, shared)
            store_sums(s, number, part, split, is_real, sums, memory, shared)
            return carry

        # A split of nothing is the first, see `hopper.rehearsal`.
        count = token.splits_from(first, programs)
        lax.fori_loop(-1 if early else 0, count, attend, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _of_rows(s: Sizes, token, numbers):
    """Cosines, or sines, of each row: its token's, see `_load_heads`."""
    own = FEW.over_rows(FEW.over_columns(numbers.at[token]))
    if s.tokens == 1:
        return own
    row = plgpu.broadcasted_iota(jnp.int32, FEW.shape, 0, layout=FEW.layout)

    def with_key(other, rows):
        its = FEW.over_rows(FEW.over_columns(numbers.at[other]))
        return jnp.where(row == s.group + other, its, rows)

    return lax.fori_loop(0, s.tokens, with_key, own)


def _load_heads(s: Sizes, heads, token, part, target, full):
    """The part's queries, then the keys and the values of all tokens, row by row."""
    key, tokens = s.heads + part, pl.ds(0, s.tokens)
    for half, columns in enumerate(COLUMNS):
        rows = target.at[half]
        queries = heads.at[token, pl.ds(part * s.group, s.group), columns]
        plgpu.copy_gmem_to_smem(queries, rows.at[pl.ds(0, s.group)], full)
        for kind, head in enumerate((key, key + s.kv_heads)):
            its = rows.at[pl.ds(s.group + kind * s.tokens, s.tokens)]
            plgpu.copy_gmem_to_smem(heads.at[tokens, head, columns], its, full)


def _cache_tokens(s: Sizes, token: Token, part, caches, rotated, arrived):
    """Stores the new keys, which are rotated, and values of the token's request, and waits until
    they are there."""
    stages = (rotated, s.group), (arrived, s.group + s.tokens)

    for number, (position, is_its) in enumerate(token.new):

        @pl.when(is_its)
        def _store(number=number, position=position):
            place = token.row_of(position)
            for cache, (stage, first) in zip(caches, stages, strict=True):
                for half, columns in enumerate(COLUMNS):
                    plgpu.copy_smem_to_gmem(
                        stage.at[half, pl.ds(first + number, 1)],
                        cache.at[pl.ds(place, 1), part, columns],
                        commit_group=False,
                    )

    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0)
