"""The forward kernel for Hopper: a program, of one warpgroup, has all heads of a token at a time.

The copy engine brings them, each half of their features as rows of 64; `gpu_heads.py` says what is
made of them. Values go on to their page from where they arrived.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.head_rotation.gpu_heads import COLUMNS, HALF, MANY, WIDTH, norm_operands
from pallas_kernels.head_rotation.triton import head_gradients
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import overlaid, two_views, views_of

__all__ = ["check", "head_gradients", "rotate_and_cache"]

STAGES = 3  # tokens whose heads are there or on their way
MOST_PROGRAMS = 3 * PROGRAMS  # registers are for three on a multiprocessor
ROWS = MANY.count


def check(heads, k_pages, v_pages):
    """Raises NotImplementedError if the kernel cannot serve these shapes."""
    arrays = heads, k_pages, v_pages
    if heads.shape[2] != WIDTH or heads.shape[1] > ROWS:
        fault = f"heads must be of width {WIDTH}, and at most {ROWS}"
    elif any(its.dtype != jnp.bfloat16 for its in arrays):
        fault = "heads and pages must be bfloat16"
    else:
        return
    shapes = ", ".join(f"{its.dtype}{list(its.shape)}" for its in arrays)
    raise NotImplementedError(f"mosaic_gpu: {fault} (heads, k_pages, v_pages: {shapes})")


def rotate_and_cache(
    heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, eps, *, interpreted=False
):
    """See `api.rotate_and_cache`. `interpreted`: for Pallas's interpreter."""
    check(heads, k_pages, v_pages)
    tokens, count, _ = heads.shape
    norms = norm_operands(heads, q_weight, k_weight)
    programs = min(tokens, MOST_PROGRAMS)
    # Pages are written where they are.
    k_pages, v_pages = jax.new_ref(k_pages), jax.new_ref(v_pages)
    arrived, rotated = (
        overlaid(two_views((*stages, 2, ROWS, HALF), heads.dtype), interpreted=interpreted)
        for stages in ((STAGES,), ())
    )
    # Not a kept one: it writes to references, which no exported function takes.
    kernel = plgpu.kernel(
        functools.partial(_body, eps, programs, interpreted),
        out_type=jax.ShapeDtypeStruct((tokens, count - 2 * k_pages.shape[2], WIDTH), heads.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=dict(
            arrived=arrived,
            rotated=rotated,
            full=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name="rotate_and_cache",
    )
    q = kernel(norms, heads, cos, sin, view, k_pages, v_pages)
    return q, jax.freeze(k_pages), jax.freeze(v_pages)


def _body(
    eps, programs, interpreted,
    norms, heads, cos, sin, view, k_pages, v_pages, q, *,
    arrived, rotated, full,
):  # fmt: skip
    program, (tokens, count, _), q_heads = lax.axis_index("program"), heads.shape, q.shape[1]
    mine = lax.div(tokens - program + (programs - 1), jnp.int32(programs))
    (load, arrived), (store, rotated) = (
        views_of(stage, 2, interpreted=interpreted)[0] for stage in (arrived, rotated)
    )
    weights = MANY.weights_of_layer(norms)
    wait_for_kernels_before(tokens)

    def load_heads(i):
        token, stage = program + i * programs, lax.rem(i, jnp.int32(STAGES))
        for half, columns in enumerate(COLUMNS):
            rows = load.at[stage, half, pl.ds(0, count)]
            plgpu.copy_gmem_to_smem(heads.at[token, :, columns], rows, full.at[stage])

    def rotate(i, carry):
        token, stage = program + i * programs, lax.rem(i, jnp.int32(STAGES))
        # While the heads are on their way. Which page follows from the first two loads.
        request, position = view.request[token], view.positions[token]
        angles = [MANY.over_rows(MANY.over_columns(its.at[token])) for its in (cos, sin)]
        place, cached = _place_in(k_pages, view.page_tables, request, position)
        plgpu.barrier_wait(full.at[stage])
        halves = MANY.loaded(arrived.at[stage])
        halves = MANY.normed_and_rotated(
            halves, weights, angles, q_heads, eps, interpreted=interpreted
        )
        # What the token before stored has left both its stage and the results'.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for half, its in enumerate(halves):
            rotated.at[half][...] = its.astype(q.dtype)
        plgpu.commit_smem()
        _store_heads(store, 0, q.at[token])

        @pl.when(cached)
        def _keys_and_values():
            _store_heads(store, q_heads, k_pages.at[*place])
            _store_heads(load.at[stage], count - v_pages.shape[2], v_pages.at[*place])

        plgpu.commit_smem_to_gmem_group()
        pl.when(i + ahead < mine)(lambda: load_heads(i + ahead))
        return carry

    ahead = STAGES - 1
    for i in range(ahead):
        pl.when(i < mine)(functools.partial(load_heads, jnp.int32(i)))
    lax.fori_loop(0, mine, rotate, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _place_in(pages, page_tables, request, position):
    """A token's page and its place there, and whether it is cached; if not, the place is any."""
    page_size, columns = jnp.int32(pages.shape[1]), page_tables.shape[1]
    column = lax.div(position, page_size)
    cached = (request >= 0) & (column < columns)
    # Where there is none, some page.
    page = page_tables[jnp.maximum(request, 0), jnp.minimum(column, columns - 1)]
    return (jnp.where(cached, page, 0), lax.rem(position, page_size)), cached


def _store_heads(stage, first, target):
    """Stores the heads [heads, D] of one token that are in a stage from row `first` on."""
    for half, columns in enumerate(COLUMNS):
        rows = stage.at[half, pl.ds(first, target.shape[0])]
        plgpu.copy_smem_to_gmem(rows, target.at[:, columns], commit_group=False)
