"""Waiting for other programs of a kernel."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir


class Made:
    """Word of what is in memory, for each of some tiles: so often it is said, so often waited for.

    Each of these counts the tile's word up by one, and the last of all makes it zero again. So the
    words, which a kernel before has made zeros, are to XLA what they are: read, by any number of
    kernels one after the other.

    Args:
      words: int32 in global memory, zeros; that of the first tile is number `first`. None for the
        interpreter, which knows no waiting for other programs: there is one.
      barrier: in place of words, that all tiles are there.
      says, waits: how often it is said of each tile, and how often waited for.
    """

    def __init__(self, words, first: int, barrier, says: int, waits: int):
        self.words, self.first, self.barrier = words, first, barrier
        self.says, self.all = says, says + waits

    def say(self, number, is_last):
        """A warpgroup says it of what it has stored of a tile, once that is in memory.

        Args:
          is_last: whether the tile is its last.
        """
        plgpu.wait_smem_to_gmem(0)
        if self.words is None:
            pl.when(is_last)(lambda: plgpu.barrier_arrive(self.barrier))
        else:
            self._count(number, "release")

    def wait(self, number, is_first):
        """Waits, all of a warpgroup, until all has been said of a tile.

        Args:
          is_first: whether the tile is the first that it waits for.
        """
        if self.words is None:
            pl.when(is_first)(lambda: plgpu.barrier_wait(self.barrier))
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def wait(context, word):
            del context
            semaphore = utils.SemaphoreRef(utils.memref_ptr(word))
            semaphore.wait(self.says, decrement=False, memory_scope="gpu")

        wait(self._word(number))
        # Nobody learns from this that anything is there: it need not wait for what is on its way.
        self._count(number, "relaxed")

    def _word(self, number):
        return self.words.at[pl.ds(self.first + number, 1)]

    def _count(self, number, semantics: str):
        """Counts a tile's word up, from the last number of all to zero.

        Args:
          semantics: "release": what was done before is visible to whoever sees it; or "relaxed".
        """

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def count(context, word):
            del context
            last = utils.c(self.all - 1, ir.IntegerType.get_signless(32))
            utils.inline_ptx(
                f"red.{semantics}.gpu.global.inc.u32 [$0], $1;",
                utils.memref_ptr(word),
                last,
                predicate=utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
                has_side_effects=True,
            )

        count(self._word(number))
