"""Joining the sums of splits of a sequence, in order of position.

A split's sums are taken with a maximum of its own. To join what is before it and the split itself,
both are scaled to the larger maximum. Whoever joins, a program that has the whole sequence or the
kernel below, uses the same functions, so that bits are the same.

Sums of no positions (maximum -inf, sums 0) change nothing but the sign of a zero, and the results
have no negative zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.paged_attention.gpu_sizes import ROWS, Sizes

AHEAD = 16  # splits that are loaded together, at most: each load takes longer than a join
THREADS = 128
NOTHING_TO_JOIN = -1.0  # in place of the total of a row that has its result


def factors(maximum, maximum_of_split):
    """The joint maximum, and what the sums with either maximum are to be multiplied with."""
    joint = jnp.maximum(maximum, maximum_of_split)
    # Where neither has seen a position both are -inf; keep the arithmetic finite.
    base = jnp.where(joint == -jnp.inf, jnp.zeros_like(joint), joint)
    return joint, jnp.exp2(maximum - base), jnp.exp2(maximum_of_split - base)


def joined(sums, factor, sums_of_split, factor_of_split):
    # Behind a barrier, or the compiler fuses one product with the addition here, the other there.
    added = lax.optimization_barrier(sums_of_split * factor_of_split)
    return sums * factor + added


def inverse_of(total):
    """What sums are multiplied with: zero where no position was seen."""
    return jnp.where(total > 0, 1.0 / total, jnp.zeros_like(total))


def mean(sums, inverse):
    """A division of each of the sums would be a quarter of a small kernel's code."""
    return sums * inverse + 0.0


def join_kernel(sizes: Sizes, view, first_of_tile, found, sums, maxima, totals, *sinks, dtype):
    """Joins what the programs of a spread sequence have stored.

    Args:
      first_of_tile: int32 [T], the first token of each token's tile.
      found: [T, H, columns], or [parts, T x group, columns] without boxes: the results of tokens
        whose total is NOTHING_TO_JOIN; None where there are no such.
      sums: float32 [parts, splits, T x rows of sums, columns in whole 128]; splits are counted from
        the first that the tile sees.
      maxima, totals: float32 [parts, splits, T x 64].
      sinks: those of `gpu_splits.sinks_of_rows` where the sizes say so. dtype: of the result.

    Returns:
      [T, H, columns of sums].
    """
    s, columns = sizes, sums.shape[-1]
    if found is not None:
        found = jnp.pad(found, ((0, 0), (0, 0), (0, columns - found.shape[-1])))
    kernel = kept_kernel(
        functools.partial(_body, s),
        out_type=jax.ShapeDtypeStruct((s.tokens, s.heads, columns), dtype),
        grid=(s.tokens, s.heads),
        grid_names=("token", "head"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name=f"{s.name()}_join",
    )
    numbers = view.request, view.positions, first_of_tile
    return kernel(*numbers, found, sums, maxima, totals, *sinks)


def _body(sizes: Sizes, request, positions, first_of_tile, found, sums, maxima, totals, *refs):
    *sinks, y = refs
    s, columns = sizes, y.shape[-1]
    token, head = lax.axis_index("token"), lax.axis_index("head")
    wait_for_kernels_before(sizes.tokens, small=True)
    part, member = lax.div(head, jnp.int32(s.group)), lax.rem(head, jnp.int32(s.group))
    first, position = first_of_tile[token], positions[token]
    inside = (token - first) * s.group + member
    begin, end = jnp.int32(0), lax.div(position, jnp.int32(s.split)) + 1
    if s.window is None:
        end = jnp.minimum(end, s.spread)  # of a position past the page table there are no more
    else:
        # Splits before the window are not among those that count, nor before the tile's.
        of_tile, begin = (
            lax.div(jnp.maximum(p - s.window + 1, 0), jnp.int32(s.split))
            for p in (position - (token - first), position)
        )
        begin, end = begin - of_tile, end - of_tile
    end = jnp.where(request[token] >= 0, end, begin)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // THREADS)

    def vector(number):
        return plgpu.layout_cast(jnp.full((columns,), number, jnp.float32), layout)

    def load(split):
        place = jnp.minimum(split, end - 1)
        row = first * ROWS + inside
        its = plgpu.load(sums.at[part, place, first * s.rows_of_sums + inside], layout=layout)
        maximum = jnp.where(split < end, maxima[part, place, row], -jnp.inf)
        return its, maximum, totals[part, place, row]

    together = min(AHEAD, s.spread)

    def join(number, state):
        # All loads before the first join.
        loaded = [load(begin + number * together + ahead) for ahead in range(together)]
        for its, its_maximum, its_total in loaded:
            all_sums, maximum, total = state
            maximum, factor, its_factor = factors(maximum, vector(its_maximum))
            state = (
                joined(all_sums, factor, its, its_factor),
                maximum,
                joined(total, factor, vector(its_total), its_factor),
            )
        return state

    if found is not None:
        # Else nobody knows what is there, and it need not be read.
        total_of_first = totals[part, begin, first * ROWS + inside]
        is_known = (begin < end) & (total_of_first == NOTHING_TO_JOIN)
    sink, weight = (sinks[0][part, member], 1.0) if sinks else (-jnp.inf, 0.0)
    start = vector(0.0), vector(sink), vector(weight)
    times = lax.div(end - begin + (together - 1), jnp.int32(together))
    all_sums, _, total = lax.fori_loop(0, times, join, start)
    result = mean(all_sums, inverse_of(total)).astype(y.dtype)
    if found is not None:
        place = (token, head) if s.boxes else (part, token * s.group + member)
        result = lax.cond(
            is_known, lambda: plgpu.load(found.at[place], layout=layout), lambda: result
        )
    y.at[token, head][...] = result
