"""The Hopper kernel of two of the gradients' sums, which reads rows once for both:

    v[t] = s · right[t] · Bᵀ of each row's slot and group, and Σ left[t] ⊗ right[t] of each bucket.

A bucket is a slot and a group. Its unit of work goes through 256 features after another, and in
them through its rows, 64 at a time. Two warpgroups multiply left and right as `gpu_outer` does,
half of the features each; one multiplies right and B, for all rows side by side:

    D = rightᵀ · left : [128 features, 64 ranks] over all rows, for each 256 features
    V = right · Bᵀ : [64 rows, ranks] over all features, for each 64 rows

Sums are in the order, and have the bits, of `gpu_outer` and `gpu_shrink`.

V has no room in registers from some number of rows on. Such a bucket is divided into parts: each
has a chunk of the rows for V, and each of its slices of features is D of one part alone. So parts
read more together than the bucket has, and are done by as many programs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul import gpu_shrink_outer_units as units
from pallas_kernels.grouped_lora_matmul.gpu_outer_rows import ROWS
from pallas_kernels.grouped_lora_matmul.gpu_rows import Runs
from pallas_kernels.grouped_lora_matmul.gpu_shrink_outer_roles import (
    B_STAGES,
    BLOCKS,
    OUTERS,
    STAGES,
    Roles,
)
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import overlaid, two_views, views_of
from pallas_kernels.hopper.store import whole_lines

SHRINKER, MEMORY = OUTERS, OUTERS + 1


def shrink_outer_kernel(
    left,
    columns: tuple[tuple[int, int], ...],
    right,
    spans: tuple[tuple[int, int], ...],
    runs: Runs,
    factors,
    scalings,
    tile: int,
    *,
    interpreted=False,
):
    """v of each row and term, and the sums of left[t] ⊗ right[t] of each bucket and term.

    Args:
      left: [M, a multiple of 64], u of all terms. columns: first and rank of each, which are in
        one block of 64.
      right: [M, all spans' columns]. spans: start and width of each term, which no two share.
      runs: of the buckets slot * G + group.
      factors: [S, G, rank, width] of each term. scalings: float32 [S, G or 1].
      tile: columns of v for each term, one of `STAGES`; no rank is larger.

    Returns:
      [M, a multiple of 64], where v of a term begins after `tile` columns of each before it, with
      zeros past its rank, and what is in other columns or rows without a slot may be anything;
      [buckets, rank, width] of each term. All are of right's dtype.
    """
    dtype, terms = right.dtype, len(spans)
    slots, groups = factors[0].shape[:2]
    strips, scaling_groups = units.strips_of(columns, spans), [its.shape[1] for its in scalings]
    words = units.units_of(runs, right.shape[0], slots)
    programs = min(PROGRAMS, words.shape[0] // units.WORDS)
    ring = STAGES[tile]
    stages = {
        "left": (ring, ROWS, 64),
        "right": (ring, BLOCKS, ROWS, 64),
        "b": (B_STAGES, BLOCKS, tile, 64),
    }

    def body(left, right, words, begins, ends, *refs, **scratch):
        views = {
            name: views_of(scratch.pop(f"{name}_stage"), 2, interpreted=interpreted)[0]
            for name in stages
        }
        of_terms = zip(refs[terms : 2 * terms], scaling_groups, strict=True)
        operands = left, right, refs[:terms], tuple(of_terms)
        out = refs[2 * terms], refs[2 * terms + 1 :]
        known = strips, columns, groups, tile, begins, ends
        roles = Roles(*known, operands, out, views, interpreted, **scratch)
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        turns, left_over = (
            f(words[units.WORDS - 1], jnp.int32(programs)) for f in (lax.div, lax.rem)
        )

        def place_in(turn):
            """Long units come first: who has a long one in a turn has a short one in the next."""
            return jnp.where(turn & 1 == 1, programs - 1 - program, program)

        mine = turns + (place_in(turns) < left_over)

        def unit_at(i):
            place = (i * programs + place_in(i)) * units.WORDS
            return units.Unit(*(words[place + word] for word in range(len(units.Unit._fields))))

        def for_units(handle, state):
            lax.fori_loop(0, mine, lambda i, state: handle(unit_at(i), state), state)

        zero = jnp.int32(0)
        pl.when(warpgroup == MEMORY)(lambda: for_units(roles.load, (zero, zero)))

        @pl.when(warpgroup == SHRINKER)
        def _shrink():
            for_units(roles.shrink, (zero, zero))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup < OUTERS)
        def _outer():
            for_units(functools.partial(roles.outer, warpgroup), zero)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def buffer(*shape):
        transforms = (
            plgpu.TilingTransform((1, shape[-1])),
            plgpu.SwizzleTransform(shape[-1] * dtype.itemsize),
        )
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    v_columns = 64 * pl.cdiv(terms * tile, 64)
    kernel = kept_kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((right.shape[0], v_columns), dtype),
            *(
                jax.ShapeDtypeStruct((slots * groups, rank, whole_lines(width, 64)), dtype)
                for (_, rank), (_, width) in zip(columns, spans, strict=True)
            ),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=OUTERS + 2,
        thread_name="warpgroup",
        scratch_types=dict(
            **{
                f"{name}_stage": overlaid(two_views(shape, dtype), interpreted=interpreted)
                for name, shape in stages.items()
            },
            sums=buffer(OUTERS, BLOCKS // OUTERS, tile, 64),
            v_rows=buffer(units.CHUNK, tile),
            full=plgpu.Barrier(num_arrivals=1 + BLOCKS, num_barriers=ring),
            clean=plgpu.Barrier(num_barriers=ring),
            ready=plgpu.Barrier(num_arrivals=OUTERS, num_barriers=ring),
            empty=plgpu.Barrier(num_arrivals=OUTERS + 1, num_barriers=ring),
            b_full=plgpu.Barrier(num_arrivals=BLOCKS, num_barriers=B_STAGES),
            b_empty=plgpu.Barrier(num_arrivals=1, num_barriers=B_STAGES),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"lora_shrink_outer_r{max(rank for _, rank in columns)}"
        f"_n{sum(width for _, width in spans)}_x{terms}",
    )
    flat = (its.reshape(-1) for its in scalings)
    v, *sums = kernel(left, right, words, runs.begin, runs.end, *factors, *flat)
    return v, tuple(its[:, :, :width] for its, (_, width) in zip(sums, spans, strict=True))
