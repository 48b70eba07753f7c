"""Waiting for other programs of a kernel, by a word in memory that they count up.

Pallas's own semaphores cost a copy: XLA lays out their zero, a constant, before each kernel. This
word is an array that some kernel before has set to zero, for this one alone: XLA does not know that
it changes, so nobody may read it after.
"""

from __future__ import annotations

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu


def arrive(word):
    """Counts up the word, int32 [1], once for the warpgroup: what it did before is visible."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def count_up(context, word):
        del context
        utils.SemaphoreRef(utils.memref_ptr(word)).signal(1, memory_scope="gpu")

    count_up(word)


def wait_for_arrivals(word, count: int):
    """Waits, all of a warpgroup, until so many have arrived."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(context, word):
        del context
        semaphore = utils.SemaphoreRef(utils.memref_ptr(word))
        semaphore.wait(count, decrement=False, memory_scope="gpu")

    wait(word)
