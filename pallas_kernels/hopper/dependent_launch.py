"""A kernel begins while the one before it ends (programmatic dependent launch).

From JAX 0.12 on CUDA graphs have Mosaic's kernels as nodes of their own, whose edges say so. Until
then a kernel of a graph waits as a whole.

The rule for all kernels: every thread waits before it reads what other kernels write, and before it
stores; and only then may the next kernel begin, or, of a small kernel, at once: the one before it
may run still when the next one begins. So what a kernel reads before it waits must not be written
by two of these kernels right before it: weights, the number of a layer that others read before,
what XLA's kernels make of a step's input, as slots and positions, and keys and values of steps
before.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import implementation

# Of a kernel. Of one that begins early any multiprocessor has any program: with more rows, programs
# that read the same lose more than is gained (NOTES, "Which multiprocessor has which program").
MOST_ROWS = 2048


def begins_early(rows: int) -> bool:
    """Whether a kernel of so many rows is launched while the one before it runs."""
    return implementation.DEPENDENT_LAUNCH and rows <= MOST_ROWS


def wait_for_kernels_before(rows: int, *, small: bool = False):
    """Waits until what the kernels before have stored is there, then lets the next one begin.

    To be called once by each warpgroup. `small`: the next one begins first, and has its weights on
    their way for as long as this one waits; of two kernels in a row one may be small.
    """
    if not begins_early(rows):
        return
    if small:
        plgpu.griddepcontrol_launch_dependents()
    plgpu.griddepcontrol_wait()
    if not small:
        plgpu.griddepcontrol_launch_dependents()
