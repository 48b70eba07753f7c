"""Sizes of an H100 or H200."""

from __future__ import annotations

import jax

PROGRAMS = 132  # multiprocessors: persistent kernels run one program on each
SHARED_MEMORY = 227 * 1024 - 1024  # bytes a program may use, less its barriers
HALF_MEMORY = 113 * 1024 - 1024  # the same where two share a multiprocessor
ARRAY = 1024  # bytes of shared memory that every array takes a multiple of
L2 = 50 * 1024 * 1024  # bytes


def runs_all_programs_at_once() -> bool:
    """Whether programs may wait for each other: each has a multiprocessor of its own.

    Compiled ahead of time, without a GPU, kernels are for one that does.
    """
    device = jax.local_devices()[0]
    return device.platform != "gpu" or device.core_count >= PROGRAMS
