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

import jax
import jax.numpy as jnp
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

TOKENS = 1


def check(heads, k_pages, v_pages, view):
    """Raises NotImplementedError if the kernel cannot serve these shapes."""
    head_rotation.check(heads, k_pages, v_pages)
    q = _queries(heads, k_pages)
    paged_attention.check_grouped(q, k_pages, v_pages, view, None)
    if heads.shape[0] != TOKENS or q.shape[1] > MOST_HEADS * k_pages.shape[2]:
        raise NotImplementedError(
            f"mosaic_gpu: one token, and at most {MOST_HEADS} query heads of a key/value head "
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
    part, first = lax.rem(program, jnp.int32(s.parts)), lax.div(program, jnp.int32(s.parts))
    (load, arrived), (store, queries) = (
        views_of(stage, 2, interpreted=s.interpreted)[0] for stage in (arrived, queries)
    )
    caches, early = (k_pages, v_pages), begins_early(TOKENS)

    def kinds_of(token):
        """Keys and values."""
        kinds = zip(caches, stages, full, empty, strict=True)
        return [Blocks(s, token, part, *its) for its in kinds]

    @pl.when(warpgroup == 1)
    def _memory():
        token = Token(s, view)
        kinds = kinds_of(token)
        # The kernel before makes no others than the token's own.
        for its in kinds:
            its.load_before_token(first)
        wait_for_kernels_before(TOKENS)

        def load_rest(i, carry):
            split = first + i * programs
            pl.when(i == 0)(lambda: plgpu.barrier_wait(rotated))

            @pl.when(split == token.splits - 1)
            def _new():
                _cache_token(s, token, part, caches, store, load)
                for its in kinds:
                    its.load(split, token.blocks_of(split) - 1)

            for its in kinds:
                plgpu.barrier_wait(its.empty)
                its.load_before_token(split + programs)
            return carry

        lax.fori_loop(0, token.splits_from(first, programs), load_rest, None)

    @pl.when(warpgroup == 0)
    def _compute():
        def load_heads():
            wait_for_kernels_before(TOKENS)
            _load_heads(s, heads, part, load, heads_full)

        if not early:
            load_heads()
        # Before anything is known of the token.
        angles = [FEW.over_columns(its.at[0]) for its in (cos, sin)]
        weights = FEW.weights_of_layer(norms)
        shared.begin()

        def arrived_heads():
            if early:
                load_heads()
            plgpu.barrier_wait(heads_full)
            return FEW.loaded(arrived)

        def rotate(is_real):
            its = if_real(is_real, arrived_heads, FEW.nothing())
            halves = FEW.normed_and_rotated(its, weights, angles, s.group, eps)
            for half, its in enumerate(halves):
                store_registers(queries.at[half], its.astype(queries.dtype), swizzled=False)
            plgpu.commit_smem()
            pl.when(is_real)(lambda: plgpu.barrier_arrive(rotated))

        if not early:
            rotate(True)
        token = Token(s, view)
        keys, values = kinds_of(token)

        def attend(i, carry):
            is_real, split = i >= 0 if early else True, first + i * programs
            if early:
                pl.when(i <= 0)(lambda: rotate(is_real))
            blocks = jnp.where(is_real, token.blocks_of(split), 0)
            sums = sums_of_split(s, token, split, blocks, queries, keys, values, shared)
            store_sums(s, part, split, is_real, sums, memory, shared)
            return carry

        # A split of nothing is the first, see `hopper.rehearsal`.
        count = token.splits_from(first, programs)
        lax.fori_loop(-1 if early else 0, count, attend, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


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


def _cache_token(s: Sizes, token: Token, part, caches, rotated, arrived):
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
