"""The ring of stages of a product's program, as its warpgroups see it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_product_layout import ProductLayout
from pallas_kernels.hopper.memory import views_of


class Stages:
    """What copies write, and what products read."""

    def __init__(
        self,
        layout: ProductLayout,
        x_stage,
        w_stage,
        full,
        empty,
        low_rank_full=None,
        own_u=None,
        kept_u=None,
    ):
        uses = (2, 2) if layout.terms and not layout.inner else (2,)
        shrink = (2,) if layout.beside else ()
        (self.x_load, self.x_tiles), *u_views = views_of(
            x_stage, *uses, *shrink, interpreted=layout.interpreted
        )
        uses = (2, 2 if layout.inner else 1) if layout.terms else (2,)
        (self.w_load, self.w_tiles), *b_views = views_of(
            w_stage, *uses, *shrink, interpreted=layout.interpreted
        )
        # Those of x and of A, in a program that has a shrink in place of the product.
        self.of_shrink = [views.pop() for views in (u_views, b_views)] if shrink else None
        if layout.inner:
            ((self.own_u, self.own_u_tiles),) = views_of(own_u, 2, interpreted=layout.interpreted)
        elif layout.terms:
            ((self.u_load, self.u_tiles),) = u_views
        self.kept_u = kept_u
        if layout.terms:
            # One view, or what copies write and what products read.
            (views,) = b_views
            self.b_load, self.b = views[0], views[-1]
        self.full, self.empty, self.low_rank_full = full, empty, low_rank_full
        self.layout, self.count = layout, layout.schedule.stages

    def w_block(self, stage, part, block):
        """64 rows of W from the first of a block's features."""
        if self.layout.by_rows:
            first = self.layout.schedule.width * block
            return self.w_tiles.at[stage, part, pl.ds(first, 64)]
        return self.w_tiles.at[stage, part, block]

    def x_block(self, stage, k, part, height):
        """A block of the columns of x, of the K step in a stage."""
        if self.layout.normed:
            return self.x_tiles.at[k * self.layout.schedule.depth + part]
        return self.x_tiles.at[stage, part, pl.ds(0, height)]

    def a_block(self, stage, part):
        """The ranks of A, after the last rows of W."""
        return self.w_tiles.at[stage, part, pl.ds(self.layout.first_a_row, 64)]

    def b_block(self, stage, run, place, block):
        """64 features of the factor of one of the terms of one of a stage's runs."""
        if self.layout.by_rows:
            return self.b.at[self.first_b(stage, run) + place * self.layout.feature_blocks + block]
        return self.b.at[self.first_b(stage, run) + place, :, pl.ds(64 * block, 64)]

    def first_b(self, stage, run):
        """The first block of B of one of a stage's runs."""
        return stage * self.layout.b_per_stage + run * self.layout.terms_of_stage

    def stage_of(self, step):
        return lax.rem(step, jnp.int32(self.count))

    def of_run(self, first_step, count):
        """Where the low-rank step after `count` others of a tile is, which begin at a step.

        Returns:
          The step and stage, the run among the stage's, and its barrier.
        """
        runs = jnp.int32(self.layout.runs_of_stage)
        step, run = first_step + lax.div(count, runs), lax.rem(count, runs)
        stage = self.stage_of(step)
        return step, stage, run, self.run_full(stage, run)

    def run_full(self, stage, run):
        """The barrier of one of a stage's runs."""
        return self.low_rank_full.at[stage * self.layout.runs_of_stage + run]

    def after(self, first_step, count):
        """The step after `count` low-rank steps of a tile."""
        runs = self.layout.runs_of_stage
        return first_step + lax.div(count + (runs - 1), jnp.int32(runs))

    def release(self, step):
        """Says, for one consumer, that what a step's stage holds has been read."""
        plgpu.barrier_arrive(self.empty.at[self.stage_of(step)])
