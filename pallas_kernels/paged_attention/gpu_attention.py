"""The Hopper kernel of paged attention: one pass over a request's cache, in order of position.

A unit is a tile of tokens of one request and the query heads that share keys and values: 64 rows of
(token, head), which read the cache once together. Grouped heads and latents differ only in what a
position's columns are: lines of 64, of which the first are keys and some (the latent's own, or
those after the keys) are values.

    for each block of 64 positions:
        S = Q · Kᵀ                 [64 rows, 64 positions]
        P = exp2(S - maximum)      rounded to the cache's dtype
        O = O · correction + P · V

Every row's numbers are its own: blocks come in order of position from the first, and one that lies
wholly past a row's position (or before its window) changes no bit of it. So bits do not depend on
the tile, the chunk or the batch. Values of positions that no row of the tile sees are set to zero,
as they may be anything, and 0 x NaN is NaN.

With many columns of values (latents) two warpgroups have half of O's columns each, and take blocks
in pairs. Each makes S and P of one block; they agree on the maximum, and P goes to the other by the
memory of the block's rotary keys, which nobody needs any more. Shared memory holds but one pair, so
that it is loaded and given back in small pieces: first those that are used last by one consumer.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.accumulate import continued
from pallas_kernels.hopper.machine import PROGRAMS
from pallas_kernels.hopper.memory import drain, overlaid, two_views, views_of
from pallas_kernels.hopper.store import store_rows, whole_lines
from pallas_kernels.paged_attention.gpu_sizes import BLOCK, LINE, ROWS, Sizes
from pallas_kernels.paged_attention.tiles import TILE_WORDS, token_tiles


def attention_kernel(sizes: Sizes, q, caches, view):
    """Attends.

    Args:
      q: [T, H, columns of all keys]. caches: [P, page, heads of the cache, columns], one for each
        of the sizes' lines.

    Returns:
      [T, H, columns of the values] in q's dtype.
    """
    s = sizes
    # Rows of a unit's heads together, so that those of a tile follow each other.
    rows_of_part = s.tokens * s.group
    q = q.reshape(s.tokens, s.parts, s.group, -1).swapaxes(0, 1)
    q = q.reshape(s.parts, rows_of_part, -1)
    tiled = (plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(128))
    stored = (plgpu.TilingTransform((1, LINE)), plgpu.SwizzleTransform(128))
    programs = min(PROGRAMS, s.tokens * s.parts)
    scratch = dict(
        # The result takes the place of the queries.
        q_stage=overlaid(
            two_views((s.key_lines, ROWS, LINE), q.dtype),
            [plgpu.SMEM((s.value_lines, ROWS, LINE), q.dtype, transforms=stored)],
            interpreted=s.interpreted,
        ),
        stages=plgpu.SMEM((s.stages, sum(s.lines), BLOCK, LINE), q.dtype, transforms=tiled),
        q_full=plgpu.Barrier(num_arrivals=s.key_lines),
        scored=plgpu.Barrier(num_arrivals=s.consumers),
        stored=plgpu.Barrier(num_arrivals=s.consumers, num_barriers=1),
        full=[
            plgpu.Barrier(num_arrivals=BLOCK // s.copy * len(piece), num_barriers=s.stages)
            for piece in s.pieces(0)
        ],
        empty=[plgpu.Barrier(num_barriers=s.stages) for _ in s.pieces(0)],
    )
    if s.consumers > 1:
        scratch["exchanged"] = plgpu.SMEM((s.consumers, ROWS), jnp.float32)
        scratch["maxima"] = plgpu.Barrier(num_arrivals=s.consumers)
        scratch["weighted"] = plgpu.Barrier(num_arrivals=s.consumers)
    elif s.interpreted:
        # The interpreter multiplies only what is in shared memory.
        scratch["weights"] = plgpu.SMEM((ROWS, BLOCK), q.dtype)
    kernel = plgpu.kernel(
        functools.partial(_body, s, programs, len(caches)),
        out_type=jax.ShapeDtypeStruct(
            (s.parts, rows_of_part, whole_lines(s.value_lines * LINE, LINE)), q.dtype
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=s.consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=s.name(),
    )
    y = kernel(*token_tiles(view, s.tile), view.page_tables, q, *caches)
    y = y[:, :, : s.value_lines * LINE].reshape(s.parts, s.tokens, s.group, -1)
    return y.swapaxes(0, 1).reshape(s.tokens, s.heads, -1)


def _body(
    sizes: Sizes, programs: int, cache_count: int, count, words, page_tables, q, *refs, **scratch
):
    caches, y = refs[:cache_count], refs[cache_count]
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    units = count[0] * sizes.parts
    mine = lax.div(units - program + (programs - 1), jnp.int32(programs))
    kernel = _Kernel(sizes, words, page_tables, q, caches, y, **scratch)

    def unit_at(i):
        return kernel.unit_at(program + i * programs)

    @pl.when(warpgroup == sizes.consumers)
    def _memory():
        if sizes.consumers > 1:
            plgpu.set_max_registers(40, action="decrease")

        def load(i, step):
            return kernel.load_unit(unit_at(i), step)

        steps = lax.fori_loop(0, mine, load, jnp.int32(0))
        for empty in kernel.empty:
            drain(empty, steps, sizes.stages)

    @pl.when(warpgroup < sizes.consumers)
    def _compute():
        if sizes.consumers > 1:
            plgpu.set_max_registers(232, action="increase")

        def compute(i, step):
            return kernel.compute_unit(unit_at(i), i, step, warpgroup)

        lax.fori_loop(0, mine, compute, jnp.int32(0))
        pl.when(warpgroup == 0)(lambda: drain(kernel.stored, mine, 1))


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A tile of tokens and a part of the heads; it sees rounds [first_round, end_round).

    A round is one block for each consumer.
    """

    part: jax.Array
    token: jax.Array
    tokens: jax.Array
    request: jax.Array
    position: jax.Array
    first: jax.Array  # the first position that its first token sees
    first_round: jax.Array
    end_round: jax.Array

    @property
    def last(self):
        """The position of the last token."""
        return self.position + self.tokens - 1


class _Kernel:
    """The two roles of a program, over the kernel's references."""

    def __init__(
        self,
        sizes,
        words,
        page_tables,
        q,
        caches,
        y,
        q_stage,
        stages,
        q_full,
        scored,
        stored,
        full,
        empty,
        weights=None,
        exchanged=None,
        maxima=None,
        weighted=None,
    ):
        self.sizes, self.words, self.page_tables = sizes, words, page_tables
        self.q, self.caches, self.y = q, caches, y
        views = views_of(q_stage, 2, 1, interpreted=sizes.interpreted)
        (self.q_load, self.q_stage), (self.out,) = views
        self.stages, self.weights = stages, weights
        self.q_full, self.scored, self.stored = q_full, scored, stored
        self.full, self.empty = full, empty
        self.exchanged, self.maxima, self.weighted = exchanged, maxima, weighted

    def unit_at(self, index) -> _Unit:
        s = self.sizes
        tile = lax.div(index, jnp.int32(s.parts))
        token, tokens, request, position = (
            self.words[tile * TILE_WORDS + word] for word in range(TILE_WORDS)
        )
        first = jnp.int32(0) if s.window is None else jnp.maximum(position - s.window + 1, 0)
        round_size = s.consumers * BLOCK
        first_round = lax.div(first, jnp.int32(round_size))
        end_round = lax.div(position + tokens + (round_size - 1), jnp.int32(round_size))
        return _Unit(
            part=lax.rem(index, jnp.int32(s.parts)),
            token=token,
            tokens=tokens,
            request=request,
            position=position,
            first=first,
            first_round=first_round,
            end_round=jnp.where(request >= 0, end_round, 0),
        )

    def stage_of(self, step):
        return lax.rem(step, jnp.int32(self.sizes.stages))

    # The memory warpgroup.

    def load_unit(self, unit: _Unit, step):
        s = self.sizes

        def load(round_, state):
            pages, step = state
            # Read now, needed for the next round.
            following = self.pages_of_round(unit, round_ + 1)
            pieces = [s.pieces(owner) for owner in range(s.consumers)]
            for number in range(len(pieces[0])):
                for owner in range(s.consumers):
                    stage = self.stage_of(step + owner)

                    @pl.when(step >= s.stages)
                    def _wait(empty=self.empty[number].at[stage]):
                        plgpu.barrier_wait(empty)

                    block = round_ * s.consumers + owner
                    full = self.full[number].at[stage]
                    self.load_lines(unit, block, pages[owner], stage, pieces[owner][number], full)
            return following, step + s.consumers

        start = self.pages_of_round(unit, unit.first_round), step
        return lax.fori_loop(unit.first_round, unit.end_round, load, start)[1]

    def pages_of_round(self, unit: _Unit, round_):
        first = round_ * self.sizes.consumers
        return tuple(self.pages_of(unit, first + i) for i in range(self.sizes.consumers))

    def pages_of(self, unit: _Unit, block):
        """The pages of a block; past the last position, where entries mean nothing, the last."""
        s, request = self.sizes, jnp.maximum(unit.request, 0)
        last = lax.div(unit.last, jnp.int32(s.page))
        starts = [block * BLOCK + number * s.copy for number in range(BLOCK // s.copy)]
        return tuple(
            self.page_tables[request, jnp.minimum(lax.div(start, jnp.int32(s.page)), last)]
            for start in starts
        )

    def load_lines(self, unit: _Unit, block, pages, stage, lines, full):
        s = self.sizes
        head = lax.div(unit.part, jnp.int32(s.units_of_head))
        places = [(c, i) for c, n in zip(self.caches, s.lines, strict=True) for i in range(n)]
        for number, page in enumerate(pages):
            inside = lax.rem(block * BLOCK + number * s.copy, jnp.int32(s.page))
            positions = pl.ds(pl.multiple_of(inside, s.copy), s.copy)
            for line in lines:
                cache, i = places[line]
                plgpu.copy_gmem_to_smem(
                    cache.at[page, positions, head, pl.ds(i * LINE, LINE)],
                    self.stages.at[stage, line, pl.ds(number * s.copy, s.copy)],
                    full,
                )

    # The consumer warpgroups.

    def compute_unit(self, unit: _Unit, i, step, warpgroup):
        s = self.sizes
        pl.when(warpgroup == 0)(functools.partial(self.load_queries, unit, i))
        plgpu.barrier_wait(self.q_full)
        of_row = plgpu.Layout.WGMMA.reduce(1)
        start = (
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), of_row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_row),
            tuple(
                plgpu.layout_cast(jnp.zeros((ROWS, LINE), jnp.float32), plgpu.Layout.WGMMA)
                for _ in range(s.value_lines // s.consumers)
            ),
            step,
        )
        attend = functools.partial(self.attend, unit, self.positions_of_rows(unit), warpgroup)
        _, total, sums, step = lax.fori_loop(unit.first_round, unit.end_round, attend, start)
        if s.consumers > 1:
            self.exchanged[warpgroup] = total
        # Nobody reads the queries any more.
        plgpu.barrier_arrive(self.scored)
        plgpu.barrier_wait(self.scored)
        if s.consumers > 1:
            total = self.of_consumer(0) + self.of_consumer(1)
        self.store(unit, warpgroup, total, sums)
        return step

    def load_queries(self, unit: _Unit, i):
        @pl.when(i > 0)
        def _wait():
            plgpu.barrier_wait(self.stored.at[0])

        for line in range(self.sizes.key_lines):
            rows = pl.ds(unit.token * self.sizes.group, ROWS)
            source = self.q.at[unit.part, rows, pl.ds(line * LINE, LINE)]
            plgpu.copy_gmem_to_smem(source, self.q_load.at[line], self.q_full)

    def attend(self, unit: _Unit, positions, warpgroup, round_, state):
        s = self.sizes
        maximum, total, sums, step = state
        block = round_ * s.consumers + warpgroup
        scores = self.masked(positions, block, self.scores(unit, block, step, warpgroup))
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        if s.consumers > 1:
            self.exchanged[warpgroup] = new_maximum
            plgpu.barrier_arrive(self.maxima)
            plgpu.barrier_wait(self.maxima)
            new_maximum = jnp.maximum(new_maximum, self.of_consumer(1 - warpgroup))
        # Before a row's first visible block the maximum is -inf; keep the arithmetic finite.
        base = jnp.where(new_maximum == -jnp.inf, jnp.zeros_like(new_maximum), new_maximum)
        correction = jnp.exp2(maximum - base)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(base, scores.shape, [0]))
        total = total * correction + weights.sum(axis=1)
        correction = lax.broadcast_in_dim(correction, (ROWS, LINE), [0])
        sums = tuple(its * correction for its in sums)
        sums = self.add_values(warpgroup, step, weights.astype(self.stages.dtype), sums)
        return new_maximum, total, sums, step + s.consumers

    def of_consumer(self, warpgroup):
        """What a consumer has put into `exchanged`, one number for each row."""
        numbers = plgpu.load(self.exchanged.at[warpgroup], layout=plgpu.Layout.WGMMA.reduce(1))
        return plgpu.layout_cast(numbers, plgpu.Layout.WGMMA.reduce(1))

    def scores(self, unit: _Unit, block, step, warpgroup):
        """Q · Kᵀ, scaled for powers of two."""
        s, stage = self.sizes, self.stage_of(step + warpgroup)
        first, stop = unit.first - block * BLOCK, unit.last + 1 - block * BLOCK

        def multiply(accumulator):
            for lines, full in zip(s.pieces(warpgroup), self.full, strict=True):
                plgpu.barrier_wait(full.at[stage])

                @pl.when((first > 0) | (stop < BLOCK))
                def _clear_others(lines=lines):
                    self.clear_values(stage, lines, first, stop)
                    plgpu.commit_smem()

                for line in lines[: s.key_lines]:
                    keys = self.stages.at[stage, line].T
                    plgpu.wgmma(accumulator, self.q_stage.at[line], keys)
            plgpu.wgmma_wait(0)
            return accumulator[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, BLOCK)))
        return scores * (s.scale * math.log2(math.e))

    def positions_of_rows(self, unit: _Unit):
        """The position of each row's token."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        return unit.position + lax.div(row, jnp.int32(self.sizes.group))

    def masked(self, positions, block, scores):
        """-inf where a row may not look."""
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        last = lax.broadcast_in_dim(positions - block * BLOCK, scores.shape, [0])
        visible = column <= last
        if self.sizes.window is not None:
            visible &= column > last - self.sizes.window
        return jnp.where(visible, scores, jnp.full_like(scores, -jnp.inf))

    def add_values(self, warpgroup, step, weights, sums):
        """The sums plus P · V, of this consumer's block and then of the other's.

        Gives pieces back as their last products end.
        """
        s, half = self.sizes, len(self.full) // 2
        stage, left = self.stage_of(step + warpgroup), weights
        if s.interpreted:
            left = self.stages.at[stage, s.value_lines] if s.consumers > 1 else self.weights
        if s.consumers == 1:
            if s.interpreted:
                left[...] = weights
            lines = range(s.first_value, s.first_value + s.value_lines)
            own, others = [(self.empty[0], lines)], []
        else:
            own = list(zip(self.empty, s.pieces(warpgroup), strict=True))[:half]
            others = list(zip(self.empty, s.pieces(1 - warpgroup), strict=True))[half:]
            # Its rotary keys are past all products.
            shared = self.stages.at[stage, s.value_lines]
            shared[...] = weights
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.weighted)

        def add(accumulators):
            def multiply(left, stage, pieces):
                lines = [line for _, lines in pieces for line in lines]
                for accumulator, line in zip(accumulators, lines, strict=False):
                    plgpu.wgmma(accumulator, left, self.stages.at[stage, line])

            def give_back(stage, pieces, pending):
                for empty, lines in pieces:
                    pending = max(0, pending - len(lines))
                    plgpu.wgmma_wait(pending)
                    plgpu.barrier_arrive(empty.at[stage])

            multiply(left, stage, own)
            if others:
                other = self.stage_of(step + 1 - warpgroup)
                for full in self.full[half:]:
                    plgpu.barrier_wait(full.at[other])
                plgpu.barrier_wait(self.weighted)
                multiply(self.stages.at[other, s.value_lines], other, others[:-1])
            pending = len(accumulators)
            give_back(stage, own, pending * (1 + bool(others)))
            if others:
                give_back(other, others, pending)

        return tuple(continued(list(sums), add, s.interpreted))

    def clear_values(self, stage, lines, first, stop):
        """Zeroes the values among some lines of a block outside of [first, stop)."""
        s = self.sizes
        for line in lines:
            # Lines of values come first where there are two consumers.
            if s.consumers == 1 and line < s.first_value:
                continue
            tile = self.stages.at[stage, line]
            values = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
            seen = (row >= first) & (row < stop)
            tile[...] = jnp.where(seen, values, jnp.zeros_like(values))

    def store(self, unit: _Unit, warpgroup, total, sums):
        """The weighted means; zeros for padding tokens."""
        s = self.sizes
        total = lax.broadcast_in_dim(total, (ROWS, LINE), [0])
        lines = [warpgroup * len(sums) + number for number in range(len(sums))]
        for line, its in zip(lines, sums, strict=True):
            mean = jnp.where(total > 0, its / total, jnp.zeros_like(its))
            self.out.at[line][...] = mean.astype(self.out.dtype)
        plgpu.commit_smem()
        row, count = unit.token * s.group, unit.tokens * s.group
        for line in lines:
            columns = pl.ds(line * LINE, LINE)
            store_rows(self.out.at[line], self.y.at[unit.part], row, count, ROWS, columns)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.stored.at[0])
