"""The forward kernel for Hopper: a program, of one warpgroup, has all heads of a token at a time.

The copy engine brings them, each half of their features as rows of 64. In the registers' layout of
the tensor cores a thread has the same columns of both halves, which are rotated with each other,
and four threads have a row. Values go on to their page from where they arrived.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.head_rotation.triton import head_gradients, stacked_weights
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import overlaid, two_views, views_of
from pallas_kernels.layered import layer_operands, number_of

__all__ = ["check", "head_gradients", "rotate_and_cache"]

WIDTH, HALF = 128, 64
ROWS = 64  # heads: rows of the layout
STAGES = 2  # tokens whose heads are there or on their way
MOST_PROGRAMS = 3 * PROGRAMS  # registers are for three on a multiprocessor
LAYOUT, OF_COLUMNS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
COLUMNS = pl.ds(0, HALF), pl.ds(HALF, HALF)  # of each half


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
    weights = () if q_weight is None else stacked_weights(heads, q_weight, k_weight)
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
    stacks = (its.stack for its in weights)
    norms = (layer_operands(*weights), *stacks) if weights else None
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
    if norms is not None:
        layer, *weights = norms
        of_layer = number_of(layer)
        weights = [
            [_over_columns(its.at[of_layer, columns]) for its in weights] for columns in COLUMNS
        ]
    wait_for_kernels_before(tokens)

    def load_heads(i):
        token, stage = program + i * programs, lax.rem(i, jnp.int32(STAGES))
        for half, columns in enumerate(COLUMNS):
            rows = load.at[stage, half, pl.ds(0, count)]
            plgpu.copy_gmem_to_smem(heads.at[token, :, columns], rows, full.at[stage])

    def rotate(i, carry):
        token, stage = program + i * programs, lax.rem(i, jnp.int32(STAGES))
        # What the token before stored has left both its stage and the results'. For the first this
        # keeps the compiler from loading what follows, and waiting for it, between two copies.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(i + 1 < mine)(lambda: load_heads(i + 1))
        # While the heads are on their way. Which page follows from the first two loads.
        request, position = view.request[token], view.positions[token]
        cosines, sines = (_over_columns(its.at[token]) for its in (cos, sin))
        place, cached = _place_in(k_pages, view.page_tables, request, position)
        plgpu.barrier_wait(full.at[stage])
        one, other = halves = _loaded(arrived.at[stage])
        if norms is not None:
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS, HALF), 0, layout=LAYOUT)
            one, other = (
                _weighted(its, jnp.where(row < q_heads, *map(_over_rows, both)))
                for its, both in zip(_normed(*halves, eps), weights, strict=True)
            )
        cosines, sines = _over_rows(cosines), _over_rows(sines)
        rotated.at[0][...] = _sum_of_products(one, cosines, -other, sines).astype(q.dtype)
        rotated.at[1][...] = _sum_of_products(other, cosines, one, sines).astype(q.dtype)
        plgpu.commit_smem()
        _store_heads(store, 0, q.at[token])

        @pl.when(cached)
        def _keys_and_values():
            _store_heads(store, q_heads, k_pages.at[*place])
            _store_heads(load.at[stage], count - v_pages.shape[2], v_pages.at[*place])

        plgpu.commit_smem_to_gmem_group()
        return carry

    load_heads(0)
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


def _over_columns(ref):
    """A vector of half a head's features, to be repeated over rows."""
    return plgpu.load(ref, layout=OF_COLUMNS, optimized=False)


def _loaded(stage):
    """Both halves of heads, in float32."""
    return [plgpu.load(stage.at[half], layout=LAYOUT).astype(jnp.float32) for half in (0, 1)]


def _normed(one, other, eps):
    """Both halves of heads divided by their root mean square."""
    total = _sum_of_products(one, one, other, other).sum(axis=1)
    inverse = lax.broadcast_in_dim(lax.rsqrt(total / WIDTH + eps), (ROWS, HALF), [0])
    return one * inverse, other * inverse


def _sum_of_products(a, b, c, d):
    """a * b + c * d, of any number of tokens with the same bits."""
    # Behind a barrier, or the compiler fuses one product with the addition here, the other there.
    return a * b + lax.optimization_barrier(c * d)


def _weighted(half, weight):
    """Rounded to the weight's dtype, times it, in float32."""
    return (half.astype(weight.dtype) * weight).astype(jnp.float32)


def _over_rows(vector):
    return lax.broadcast_in_dim(vector, (ROWS, HALF), [1])
