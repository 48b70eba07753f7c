"""Waiting for other programs of a kernel, by a word in memory that they count up."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu


class Arrivals:
    """How many programs have arrived.

    Args:
      word: int32 [1] in global memory, which a kernel before has set to zero, for this one alone:
        XLA does not know that it changes, so nobody may read it after. None: a semaphore of
        Pallas's, which costs a copy, as XLA lays out its zero, a constant, before each kernel.
    """

    def __init__(self, word=None):
        self.word = word
        if word is None:
            self.semaphore = pl.get_global(plgpu.SemaphoreType.REGULAR)

    def arrive(self):
        """Counts a program, once for the warpgroup: what it has done before is visible."""
        if self.word is None:
            plgpu.semaphore_signal(self.semaphore, memory_scope="gpu")
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def count_up(context, word):
            del context
            utils.SemaphoreRef(utils.memref_ptr(word)).signal(1, memory_scope="gpu")

        count_up(self.word)

    def wait(self, count: int):
        """Waits, all of a warpgroup, until so many have arrived."""
        if self.word is None:
            plgpu.semaphore_wait(self.semaphore, count, decrement=False, memory_scope="gpu")
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def wait(context, word):
            del context
            semaphore = utils.SemaphoreRef(utils.memref_ptr(word))
            semaphore.wait(count, decrement=False, memory_scope="gpu")

        wait(self.word)
