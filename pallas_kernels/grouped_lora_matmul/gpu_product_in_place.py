"""Rows of several adapters in one tall tile of a product: u·B of each run goes to the sums.

In lower tiles a run's u·B goes to a copy of the sums, from which a select takes the run's rows: 140
instructions for each run and 32 rows. Here u is zero in the other runs' rows, and the tensor cores
add zeros there. Zeros times a B that is not finite are NaN, though, and B is another tenant's:

    every tile: K loop, u·B of each run, stored; a few rows of the sums looked at, NaN remembered
    if there was any: every tile again, each of its runs as a tile of its own

If a B is not finite, no row of the tile is, so a few rows are enough; if they are not finite for
another reason, the second turn gives the same. Its time is the price of a poisoned adapter.

A stage holds B and u of several runs, as each costs its latency however little is in it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_product_layout import ProductLayout
from pallas_kernels.grouped_lora_matmul.gpu_product_stages import Stages
from pallas_kernels.grouped_lora_matmul.gpu_tiles import Tile, TileFeed
from pallas_kernels.hopper.zeros import zeros_outside

LOOKED_AT = 8  # rows of a tile: the fewest that products have


class InPlace:
    """What one consumer does with the runs of a tile.

    Args:
      health: float32 [consumers, 64] in shared memory: zeros, or NaN if sums were spoiled.
      judged: its barrier.
    """

    def __init__(self, feed: TileFeed, stages: Stages, health, judged, warpgroup):
        self.layout, self.schedule = feed.layout, feed.schedule
        self.feed, self.stages, self.warpgroup = feed, stages, warpgroup
        self.health, self.judged = health, judged
        self.own = health.at[warpgroup]
        zeros = jnp.zeros((64, LOOKED_AT), jnp.float32)
        self.own[...] = jnp.sum(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), axis=1)

    def add_runs(self, tile: Tile, is_mixed, accumulators, height, first_step):
        """Adds u·B of the tile's runs; returns the step after them.

        Products of the last K step may run still: its stage, the one before, is free after the
        first of these, or when all have ended.
        """

        def add(state):
            row, done, step = state
            row, done, runs = self.prepare(tile, is_mixed, step, row, done)
            is_first = step <= first_step - tile.k_steps

            def add_stage():
                self.add_stage(accumulators, height, step, runs, is_first)
                return step + 1

            return row, done, lax.cond(runs > 0, add_stage, lambda: step)

        state = jnp.int32(0), jnp.int32(0), first_step
        end = lax.while_loop(lambda state: state[0] < tile.rows, add, state)[2]
        plgpu.wgmma_wait(0)
        pl.when((tile.k_steps > 0) | (end > first_step))(lambda: self.release_before(end))
        return end

    def prepare(self, tile: Tile, is_mixed, step, row, done):
        """Waits for what a stage holds, a run in each place, and makes u zeros in others' rows.

        For all before the first product: those of the step before run meanwhile, and one fence is
        enough.

        Args:
          row: the first of the first run. done: how many of its low-rank steps stages before had.

        Returns:
          The same of the stage after this, and how many places of this one are used.
        """
        stage, sets = self.stages.stage_of(step), self.layout.sets()

        def prepare_next(state):
            row, done, runs = state
            slot, stop = self.feed.run_at(tile, row)
            stop = jnp.minimum(stop, tile.rows)
            steps = sum(self.layout.steps_of(its, tile.feature, slot) for its in sets)

            def prepare_run():
                plgpu.barrier_wait(self.stages.run_full(stage, runs))
                if self.layout.interpreted:
                    self.copy_kept_rows(stage, runs, row, stop)
                else:
                    pl.when(is_mixed)(lambda: self.keep_rows(stage, runs, row, stop))
                is_last = done + 1 >= steps
                return jnp.where(is_last, stop, row), jnp.where(is_last, 0, done + 1), runs + 1

            # Selects in place of `cond` make ptxas take numbers of stages from registers of lanes,
            # in the K loop as well, whose steps take 3 % longer (NOTES, "A stage's runs at once").
            has_steps = (slot >= 0) & (done < steps)
            return lax.cond(has_steps, prepare_run, lambda: (stop, jnp.int32(0), runs))

        def is_more(state):
            row, _, runs = state
            return (row < tile.rows) & (runs < self.layout.runs_of_stage)

        state = lax.while_loop(is_more, prepare_next, (row, done, jnp.int32(0)))
        if self.layout.interpreted:
            plgpu.commit_smem()
        else:
            pl.when(is_mixed)(plgpu.commit_smem)
        return state

    def add_stage(self, accumulators, height, step, runs, is_first):
        """Adds u·B of the runs of a stage.

        Args:
          is_first: whether no product of the tile was before these.
        """
        layout, blocks = self.layout, self.schedule.blocks
        stage = self.stages.stage_of(step)

        def multiply(run):
            products = 0
            for i, accumulator in enumerate(accumulators):
                block = self.warpgroup * blocks + i % blocks
                for place in layout.places_of_part(i // blocks):
                    b = self.stages.b_block(stage, run, place, block)
                    plgpu.wgmma(accumulator, b.T, self.u_block(stage, run, place, height).T)
                    products += 1
            return products

        def add_run(run, _):
            # Those before have ended when but these are left.
            plgpu.wgmma_wait(multiply(run))
            pl.when((run == 0) & ~is_first)(lambda: self.release_before(step))

        lax.fori_loop(0, runs, add_run, None)

    def u_block(self, stage, run, place, rows):
        rows = pl.ds(place * self.layout.x_rows, rows)
        if self.layout.interpreted:
            return self.stages.kept_u.at[self.warpgroup, stage, run, rows]
        return self.stages.u_tiles.at[stage, run, rows]

    def keep_rows(self, stage, run, first, stop):
        """Makes u of one of a stage's runs zeros in all rows but [first, stop).

        Both consumers do, and write the same, so that none waits for the other.
        """
        for u in self.u_of_run(self.stages.u_load, stage, run):
            zeros_outside(u, first, stop)

    def copy_kept_rows(self, stage, run, first, stop):
        """The same for the interpreter, which calls that a race: each consumer has a copy."""
        copies = self.u_of_run(self.stages.kept_u.at[self.warpgroup], stage, run)
        for u, copy in zip(self.u_of_run(self.stages.u_load, stage, run), copies, strict=True):
            row = lax.broadcasted_iota(jnp.int32, u.shape, 0)
            copy[...] = jnp.where((row >= first) & (row < stop), u[...], jnp.zeros_like(u[...]))

    def u_of_run(self, u, stage, run):
        """u of each of a run's terms, in all rows of a tile."""
        rows = self.layout.x_rows
        places = range(self.layout.terms_of_stage)
        return [u.at[stage, run, pl.ds(place * rows, rows)] for place in places]

    def release_before(self, step):
        """Says that what the stage of the step before holds has been read."""
        self.stages.release(step + (self.schedule.stages - 1))

    def look_at(self, totals):
        """Remembers whether the sums of a tile of several runs are finite."""
        zeros = sum(0 * total[:, :LOOKED_AT] for total in totals)
        self.own[...] += jnp.sum(zeros, axis=1)

    def judge(self):
        """Whether any consumer's sums were spoiled; what was stored of them has been."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.judged)
        spoiled = is_spoiled(self.health, self.judged)
        pl.when(spoiled)(lambda: plgpu.wait_smem_to_gmem(0))
        return spoiled


def is_spoiled(health, judged):
    """Whether any consumer's sums were, once all have said so."""
    plgpu.barrier_wait(judged)
    consumers, features = health.shape

    def add(i, total):
        rows = [i * 4 + row for row in range(4)]
        return total + sum(health[each, row] for each in range(consumers) for row in rows)

    return lax.fori_loop(0, features // 4, add, jnp.float32(0)) != 0


def for_tiles(layout: ProductLayout, count, handle, judge, carry):
    """handle(i, again, carry) of each of `count` tiles; of all `again` if judge() says so.

    It returns the carry, and whether the tile has several runs: without any there is nothing to
    judge. Returns how many tiles that were, and the carry.
    """

    def handle_all(again, first, carry):
        def handle_one(i, state):
            carry, mixed = state
            carry, is_mixed = handle(i, again, carry)
            return carry, mixed | is_mixed

        return lax.fori_loop(first, first + count, handle_one, (carry, jnp.bool(False)))

    if not layout.in_place:
        return count, handle_all(False, 0, carry)[0]

    def turn(state):
        first, _, carry = state
        carry, mixed = handle_all(first > 0, first, carry)
        again = lax.cond((first == 0) & mixed, judge, lambda: jnp.bool(False))
        return first + count, again, carry

    state = jnp.int32(0), jnp.bool(True), carry
    tiles, _, carry = lax.while_loop(lambda state: state[1], turn, state)
    return tiles, carry
