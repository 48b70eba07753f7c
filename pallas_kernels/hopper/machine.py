"""Sizes of an H100 or H200."""

from __future__ import annotations

import jax

PROGRAMS = 132  # multiprocessors: persistent kernels run one program on each
SHARED_MEMORY = 227 * 1024 - 1024  # bytes a program may use, less its barriers
HALF_MEMORY = 113 * 1024 - 1024  # the same where two share a multiprocessor


def has_all_programs() -> bool:
    """Whether PROGRAMS programs run at once, so that they may wait for each other.

    Some Hopper cards have fewer multiprocessors. Where kernels are compiled without a card, for an
    H100 or H200, they do.
    """
    return all(d.core_count >= PROGRAMS for d in jax.local_devices() if d.platform == "gpu")
