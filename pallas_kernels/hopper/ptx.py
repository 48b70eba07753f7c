"""What lanes do by instructions of their own: the numbers and addresses that those take."""

from __future__ import annotations

from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

NUMBER = plgpu.Layout.WG_SPLAT  # of a number that `inline_mgpu` passes


def value(its):
    """The address of a reference, or a number."""
    if isinstance(its, fragmented_array.FragmentedArray):
        return its.registers.item()
    return utils.memref_ptr(its)


def number(its: int):
    return utils.c(its, int32())


def int32():
    return ir.IntegerType.get_signless(32)


def thread(warps: int):
    """A thread's number in so many warps, a power of two."""
    return arith.andi(utils.thread_idx(), number(32 * warps - 1))
