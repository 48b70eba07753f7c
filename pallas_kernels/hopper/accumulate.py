"""Accumulators of the tensor cores that start with a value."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def continued(totals, add, interpreted: bool):
    """The totals after add(accumulators), which start with them."""
    if not interpreted:
        return pl.run_state(add)([plgpu.ACC.init(total) for total in totals])

    # The interpreter's accumulators start with zeros.
    def added(*accumulators):
        add(accumulators)
        return tuple(accumulator[...] for accumulator in accumulators)

    sums = pl.run_scoped(added, *[plgpu.ACC(total.shape) for total in totals])
    return [total + its for total, its in zip(totals, sums, strict=True)]


def start(accumulator, value, interpreted: bool):
    """Starts an accumulator with a value, which `finished` is to be given, too."""
    if not interpreted:
        accumulator[...] = value


def finished(accumulator, value, interpreted: bool, *, pending: int):
    """What an accumulator holds that started with a value; `pending` later products may run on."""
    total = plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)
    return total + value if interpreted else total
