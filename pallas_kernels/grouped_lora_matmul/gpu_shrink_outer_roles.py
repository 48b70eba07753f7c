"""The warpgroups of `gpu_shrink_outer`: one that loads, two for D, and one for V."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul import gpu_shrink_outer_units as units
from pallas_kernels.grouped_lora_matmul.gpu_heights import for_height
from pallas_kernels.grouped_lora_matmul.gpu_outer_rows import (
    ROWS,
    clear_others,
    load_rows,
    whole_units,
)
from pallas_kernels.grouped_lora_matmul.gpu_shrink_outer_units import (
    FEATURES,
    Order,
    Strip,
    Unit,
)
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import whole
from pallas_kernels.hopper.memory import from_first
from pallas_kernels.hopper.store import store_rows, store_turned

STAGES = {16: 4, 32: 3}  # by columns of V
B_STAGES = 3
BLOCKS = FEATURES // 64  # as many as a warpgroup has warps: each loads one
OUTERS = 2  # warpgroups, half of the blocks each


class Roles(Order):
    """What the warpgroups of a program do with a unit, over the kernel's references."""

    def __init__(
        self,
        strips,
        columns,
        groups,
        tile,
        begins,
        ends,
        operands,
        out,
        views,
        interpreted,
        sums,
        v_rows,
        full,
        clean,
        ready,
        empty,
        b_full,
        b_empty,
    ):
        super().__init__(strips, begins, ends)
        self.columns, self.groups, self.tile = columns, groups, tile
        self.left, self.right, self.factors, self.scalings = operands
        self.v, self.out = out
        self.interpreted = interpreted
        # Of each, what copies write, and what products read.
        self.left_load, self.left_tiles = views["left"]
        self.right_load, self.right_tiles = views["right"]
        self.b_load, self.b_tiles = views["b"]
        self.sums, self.v_rows = sums, v_rows
        self.full, self.clean, self.ready, self.empty = full, clean, ready, empty
        self.ring = STAGES[tile]
        self.b_full, self.b_empty = b_full, b_empty

    def at_strip(self, number, action):
        """action(number) where numbers of strips are Python's."""
        for its in range(len(self.strips)):
            pl.when(number == its)(functools.partial(action, its))

    def place_of(self, unit: Unit):
        """The bucket's slot and group."""
        groups = jnp.int32(self.groups)
        return lax.div(unit.bucket, groups), lax.rem(unit.bucket, groups)

    # --- the warpgroup that loads ---

    def load(self, unit: Unit, state):
        """state: (stages of rows, stages of B) so far."""

        def of_slice(row, rows, is_d, number, strip, place, state):
            step, b_step = state
            load_b = functools.partial(self.load_b, unit, strip, place)
            b_step = lax.cond(rows > 0, load_b, lambda b_step: b_step, b_step)
            load = functools.partial(self.load_rows, strip, place)
            its_rows = unit.of_rows(row, row + rows, but_all=is_d(number))
            return self.over_rows(its_rows, load, step), b_step

        def chunk(row, rows, state):
            only_v = functools.partial(of_slice, row, rows, lambda number: jnp.bool_(False))
            return self.over_slices(only_v, state)

        first = functools.partial(of_slice, *self.chunk_of(unit), unit.has)
        return self.over_other_chunks(unit, chunk, self.over_slices(first, state))

    def stage_of(self, step):
        return lax.rem(step, jnp.int32(self.ring))

    def load_rows(self, strip: Strip, number, row, kept, step):
        stage = self.stage_of(step)
        pl.when(step >= self.ring)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
        memory = self.left_load.at[stage], self.right_load.at[stage], self.full.at[stage]
        column = strip.start + number * FEATURES
        load_rows(self.left, strip.left, self.right, column, row, kept, *memory)
        return step + 1

    def load_b(self, unit: Unit, strip: Strip, number, b_step):
        stage = lax.rem(b_step, jnp.int32(B_STAGES))
        pl.when(b_step >= B_STAGES)(lambda: plgpu.barrier_wait(self.b_empty.at[stage]))
        slot, group = self.place_of(unit)

        def load(block, term):
            features = pl.ds(number * FEATURES + 64 * block, 64)
            plgpu.copy_gmem_to_smem(
                # Past its ranks and features: zeros.
                self.factors[term].at[slot, group, from_first(self.tile, slot), features],
                self.b_load.at[stage, block],
                self.b_full.at[stage],
            )

        @plgpu.warp_map
        def _load(warp):
            self.at_strip(strip.number, functools.partial(load, warp))

        return b_step + 1

    # --- the warpgroups of D ---

    def outer(self, warpgroup, unit: Unit, step):
        blocks = BLOCKS // OUTERS

        def sum_slice(strip, place, step):
            def sums(*accumulators):
                add = functools.partial(self.add, warpgroup, accumulators, step)
                end = self.over_rows(unit, add, step)
                plgpu.wgmma_wait(0)
                pl.when(end > step)(lambda: self.release(end - 1))
                return tuple(accumulator[...] for accumulator in accumulators), end

            totals, end = pl.run_scoped(sums, *[plgpu.ACC((64, 64))] * blocks)
            first = place * FEATURES + 64 * blocks * warpgroup
            store = functools.partial(self.store_sums, warpgroup, unit, first, totals)
            self.at_strip(strip.number, store)
            return end

        def pass_on(steps, step):
            return lax.fori_loop(0, steps, lambda _, step: self.pass_on(step), step)

        _, rows = self.chunk_of(unit)
        of_chunk = whole_units(rows, ROWS)

        def of_slice(number, strip, place, step):
            sum_its = functools.partial(sum_slice, strip, place)
            pass_its = functools.partial(pass_on, of_chunk)
            return lax.cond(unit.has(number), sum_its, pass_its, step)

        def chunk(row, rows, step):
            del row
            return pass_on(whole_units(rows, ROWS) * self.slices, step)

        return self.over_other_chunks(unit, chunk, self.over_slices(of_slice, step))

    def pass_on(self, step):
        """A stage that only V has use for."""
        stage = self.stage_of(step)
        plgpu.barrier_wait(self.full.at[stage])
        plgpu.barrier_arrive(self.ready.at[stage])
        self.release(step)
        return step + 1

    def release(self, step):
        plgpu.barrier_arrive(self.empty.at[self.stage_of(step)])

    def add(self, warpgroup, accumulators, first_step, row, kept, step):
        del row
        stage = self.stage_of(step)
        first = warpgroup * len(accumulators)
        plgpu.barrier_wait(self.full.at[stage])

        @pl.when(kept < ROWS)
        def _clear_others():
            memory = self.left_load.at[stage], self.right_load.at[stage]
            mine = first, len(accumulators), self.clean.at[stage]
            clear_others(warpgroup, kept, *memory, *mine, interpreted=self.interpreted)

        plgpu.barrier_arrive(self.ready.at[stage])
        for block, accumulator in enumerate(accumulators):
            features = self.right_tiles.at[stage, first + block]
            plgpu.wgmma(accumulator, features.T, self.left_tiles.at[stage])
        # All but these have ended, and what those before read is free.
        plgpu.wgmma_wait(len(accumulators))
        pl.when(step > first_step)(lambda: self.release(step - 1))
        return step + 1

    def store_sums(self, warpgroup, unit: Unit, feature, totals, term: int):
        """Of each block [64 features, 64 ranks] the term's ranks, turned."""
        first, rank = self.columns[term]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        count = whole(rank, 8)
        for block, total in enumerate(totals):
            its = total[:, first % 64 : first % 64 + count].astype(self.sums.dtype)
            store_turned(self.sums.at[warpgroup, block, pl.ds(0, count)], its)
        plgpu.commit_smem()
        for block in range(len(totals)):
            plgpu.copy_smem_to_gmem(
                self.sums.at[warpgroup, block, pl.ds(0, rank)],
                self.out[term].at[unit.bucket, :, pl.ds(feature + 64 * block, 64)],
            )

    # --- the warpgroup of V ---

    def shrink(self, unit: Unit, state):
        """state: (stages of rows, stages of B) so far."""

        def count(row, kept, steps):
            del row, kept
            return steps + 1

        of_bucket = self.over_rows(unit, count, jnp.int32(0))

        def leave(state):
            """All that D alone has use for."""
            step, b_step = state
            slices = whole_units(self.slices - unit.part, unit.parts)
            return self.leave(of_bucket * slices, step), b_step

        size = self.rows_of_chunk(unit)

        def run(number, carried):
            """Of all runs in one place: code for chunks is long."""
            past, state = carried
            is_first = number == unit.first
            begin, end = self.rows_at(unit, number)
            count = whole_units(end - begin, size)

            def chunk(i, state):
                row = begin + i * size
                rows = jnp.minimum(end - row, size)
                before = jnp.where(is_first, whole_units(i * size, ROWS), 0)
                after = of_bucket - before - whole_units(rows, ROWS)
                after = jnp.where(is_first, after, 0)
                multiply = functools.partial(self.multiply, unit, row, rows, before, after)
                return lax.cond(unit.has(past + i), multiply, lambda state: state, state)

            return past + count, lax.fori_loop(0, count, chunk, state)

        _, rows = self.chunk_of(unit)
        state = lax.cond(rows == 0, leave, lambda state: state, state)
        return lax.fori_loop(unit.first, unit.stop, run, (jnp.int32(0), state))[1]

    def leave(self, steps, step):
        def one(_, step):
            plgpu.barrier_wait(self.ready.at[self.stage_of(step)])
            self.release(step)
            return step + 1

        return lax.fori_loop(0, steps, one, step)

    def multiply(self, unit: Unit, row, rows, before, after, state):
        """V of a chunk.

        Args:
          before, after: steps of other rows in slices whose D is the unit's.
        """

        def of_strip(number, state):
            strip = self.strip_at(lambda its: number >= its.number)
            scaling = self.scaling(unit, number)

            def sum_up_to(height: int, state):
                sums = functools.partial(sum_rows, state)
                accumulators = [plgpu.ACC((ROWS, self.tile))] * (height // ROWS)
                totals, end = pl.run_scoped(sums, *accumulators)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for place, total in enumerate(totals):
                    its_rows = pl.ds(place * ROWS, ROWS)
                    self.v_rows[its_rows] = (total * scaling).astype(self.v_rows.dtype)
                return end

            def sum_rows(state, *accumulators):
                def of_slice(place, state):
                    step, b_step = state
                    is_d = unit.has(strip.before + place).astype(jnp.int32)
                    step = self.leave(before * is_d, step)
                    b_stage = lax.rem(b_step, jnp.int32(B_STAGES))
                    plgpu.barrier_wait(self.b_full.at[b_stage])
                    for accumulator in accumulators:
                        step = self.multiply_rows(accumulator, b_stage, step)
                    plgpu.barrier_arrive(self.b_empty.at[b_stage])
                    return self.leave(after * is_d, step), b_step + 1

                end = lax.fori_loop(0, strip.slices, of_slice, state)
                return tuple(accumulator[...] for accumulator in accumulators), end

            end = for_height(tuple(range(ROWS, units.CHUNK + 1, ROWS)), rows, sum_up_to, state)
            plgpu.commit_smem()
            # Nobody can compute where to before there are sums: it would wait in registers.
            none = jnp.minimum(end[1], 0)
            self.store_v(number, row + none, rows + none)
            return end

        return lax.fori_loop(0, len(self.strips), of_strip, state)

    def store_v(self, number, row, rows):
        columns = pl.ds(number * self.tile, self.tile)

        def store(step, _):
            first = step * ROWS
            its = self.v_rows.at[pl.ds(first, ROWS)]
            store_rows(its, self.v, row + first, jnp.minimum(rows - first, ROWS), ROWS, columns)

        lax.fori_loop(0, whole_units(rows, ROWS), store, None)

    def scaling(self, unit: Unit, number):
        """That of the bucket, of a strip's number."""
        slot, _ = self.place_of(unit)
        found = None
        for its, (scalings, groups) in enumerate(self.scalings):
            value = scalings[unit.bucket if groups > 1 else slot]
            found = value if found is None else jnp.where(number == its, value, found)
        return found

    def multiply_rows(self, accumulator, b_stage, step):
        stage = self.stage_of(step)
        plgpu.barrier_wait(self.ready.at[stage])

        def multiply(block, _):
            features = self.right_tiles.at[stage, block]
            plgpu.wgmma(accumulator, features, self.b_tiles.at[b_stage, block].T)

        lax.fori_loop(0, BLOCKS, multiply, None)
        plgpu.wgmma_wait(0)
        self.release(step)
        return step + 1
