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

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_product_layout import ProductLayout
from pallas_kernels.grouped_lora_matmul.gpu_product_stages import Stages
from pallas_kernels.grouped_lora_matmul.gpu_tiles import Tile, TileFeed

LOOKED_AT = 8  # rows of a tile: the fewest that products have
LANES = 128
VECTOR = 4  # words that a lane loads and stores at once


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
        """Adds u·B of the tile's runs; returns the step after them."""
        add = functools.partial(self.add_run, tile, accumulators, height, first_step)

        def several():
            run = functools.partial(add, masked=True)
            return self.feed.walk_runs(tile, 0, tile.rows, run, jnp.int32(0))

        def one():
            # A tile without rows has row 0, whose slot is nothing to it.
            slot = jnp.where(tile.rows > 0, self.feed.run_at(tile, 0)[0], -1)
            return add(slot, jnp.int32(0), tile.rows, jnp.int32(0), masked=self.layout.interpreted)

        count = lax.cond(is_mixed, several, one)
        end = self.stages.after(first_step, count)
        plgpu.wgmma_wait(0)
        pl.when(count > 0)(lambda: self.stages.release(end + (self.schedule.stages - 1)))
        return end

    def add_run(self, tile, accumulators, height, first_step, slot, first, stop, count, *, masked):
        """Adds u·B of one run, after `count` low-rank steps of others."""
        s, layout = self.schedule, self.layout

        def add(j, count):
            step, stage, run, full = self.stages.of_run(first_step, count)
            plgpu.barrier_wait(full)
            if masked:
                self.keep_rows(stage, run, first, stop)
            # The products before have ended; in all warps, once they are past `keep_rows`.
            plgpu.wgmma_wait(0)
            done = (run == 0) & (count > 0)
            pl.when(done)(lambda: self.stages.release(step + (s.stages - 1)))
            for i, accumulator in enumerate(accumulators):
                block = self.warpgroup * s.blocks + i % s.blocks
                for place in layout.places_of_part(i // s.blocks):
                    b = self.stages.b_block(stage, run, place, block)
                    plgpu.wgmma(accumulator, b.T, self.u_block(stage, run, place, height).T)
            return count + 1

        steps = sum(layout.steps_of(its, tile.feature, slot) for its in layout.sets())
        return lax.fori_loop(0, jnp.where(slot >= 0, steps, 0), add, count)

    def u_block(self, stage, run, place, rows):
        rows = pl.ds(place * self.layout.x_rows, rows)
        if self.layout.interpreted:
            return self.stages.kept_u.at[self.warpgroup, stage, run, rows]
        return self.stages.u_tiles.at[stage, run, rows]

    def keep_rows(self, stage, run, first, stop):
        """Makes u of one of a stage's runs zeros in all rows but [first, stop).

        Both consumers do, and write the same, so that none waits for the other. In the interpreter,
        which calls that a race, each has a copy.
        """
        layout, stages = self.layout, self.stages

        def is_kept(row):
            row -= sum(jnp.where(row >= its, layout.x_rows, 0) for its in layout.later_terms)
            return (row >= first) & (row < stop)

        if layout.interpreted:
            u = stages.u_tiles[stage, run]
            kept = is_kept(lax.broadcasted_iota(jnp.int32, u.shape, 0))
            stages.kept_u[self.warpgroup, stage, run] = jnp.where(kept, u, jnp.zeros_like(u))
        else:
            # Swizzles move words within a row alone.
            of_row = layout.rank_step // 2
            for begin, vector in vectors(layout.u_rows_of_run * of_row):
                count = LANES * vector
                lanes = plgpu.Layout.WG_STRIDED((count,), vec_size=vector)
                u = stages.u_words.at[stage, run, pl.ds(begin, count)]
                word = begin + plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=lanes)
                kept = is_kept(word >> (of_row.bit_length() - 1))
                u[...] = jnp.where(kept, plgpu.load(u, layout=lanes), 0)
        plgpu.commit_smem()

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


def vectors(words: int) -> list[tuple[int, int]]:
    """The first word, and words of a lane, of vectors of all lanes that cover so many words.

    The last begin before others end, if they are not whole: two lanes make the same of a word.
    """
    rest = words % (LANES * VECTOR)
    whole = [(begin, VECTOR) for begin in range(0, words - rest, LANES * VECTOR)]
    last = next(vector for vector in (1, 2, VECTOR) if LANES * vector >= rest)
    return [*whole, (words - LANES * last, last)] if rest else whole


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
