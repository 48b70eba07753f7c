"""Sizes of an H100 or H200."""

from __future__ import annotations

PROGRAMS = 132  # multiprocessors: persistent kernels run one program on each
SHARED_MEMORY = 227 * 1024 - 1024  # bytes a program may use, less its barriers
HALF_MEMORY = 113 * 1024 - 1024  # the same where two share a multiprocessor
