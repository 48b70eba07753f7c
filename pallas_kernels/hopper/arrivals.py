"""Waiting for other programs of a kernel, by words in memory that they count up."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu


class Arrivals:
    """How many warpgroups have arrived, at each of some places.

    Args:
      words: int32 [places] in global memory, which a kernel before has set to zero, for this one
        alone: XLA does not know that they change, so nobody may read them after. None: one place, a
        semaphore of Pallas's, which costs a copy, as XLA lays out its zero, a constant, before each
        kernel.
      first: the word of the first place.
    """

    def __init__(self, words=None, first: int = 0):
        self.words, self.first = words, first
        if words is None:
            self.semaphore = pl.get_global(plgpu.SemaphoreType.REGULAR)

    def arrive(self, place=0):
        """Counts a warpgroup, once: what it has done before is visible."""
        if self.words is None:
            plgpu.semaphore_signal(self.semaphore, memory_scope="gpu")
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def count_up(context, word):
            del context
            utils.SemaphoreRef(utils.memref_ptr(word)).signal(1, memory_scope="gpu")

        count_up(self.words.at[pl.ds(self.first + place, 1)])

    def wait(self, count: int, place=0):
        """Waits, all of a warpgroup, until so many have arrived."""
        if self.words is None:
            plgpu.semaphore_wait(self.semaphore, count, decrement=False, memory_scope="gpu")
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def wait(context, word):
            del context
            semaphore = utils.SemaphoreRef(utils.memref_ptr(word))
            semaphore.wait(count, decrement=False, memory_scope="gpu")

        wait(self.words.at[pl.ds(self.first + place, 1)])


class Made:
    """Word of what is in memory, for each of some tiles.

    Args:
      arrivals: None for the interpreter, which knows no waiting for other programs: there is one.
      barrier: in place of arrivals: that all tiles are there.
      count: how often it is said of a tile.
    """

    def __init__(self, arrivals: Arrivals | None, barrier, count: int):
        self.arrivals, self.barrier, self.count = arrivals, barrier, count

    def say(self, number, is_last):
        """A warpgroup says it of what it has stored of a tile, once that is in memory.

        Args:
          is_last: whether the tile is its last.
        """
        plgpu.wait_smem_to_gmem(0)
        if self.arrivals:
            self.arrivals.arrive(number)
        else:
            pl.when(is_last)(lambda: plgpu.barrier_arrive(self.barrier))

    def wait(self, number, is_first):
        """Waits until all has been said of a tile, the first that is waited for or not."""
        if self.arrivals:
            self.arrivals.wait(self.count, number)
        else:
            pl.when(is_first)(lambda: plgpu.barrier_wait(self.barrier))
