"""What the TPU kernels do, in which order: tables made in plain JAX from group sizes and slots.

Rows are cut into tiles of `block_m`, which the pipeline brings to VMEM. A task is the part of one
tile that one group owns; a run is a maximal stretch of rows of one tile with one slot (and one
group, where factors differ by group). Rows in a table count from their tile's first row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_lora_matmul.base_product import count_below


class Tables(NamedTuple):
    """What the kernels' tables are made from.

    Attributes:
      ends: int32 [G], where each group's rows end.
      row_slots: int32 [M], -1 past the last group too.
      group_of_row: int32 [M], at most the last.
    """

    ends: jax.Array
    row_slots: jax.Array
    group_of_row: jax.Array


class Route(NamedTuple):
    """The token of each row, and each choice's row."""

    token: jax.Array
    position: jax.Array
    tables: Tables


def tables(group_sizes, row_slots, groups: int) -> Tables:
    """group_sizes may be None: as many rows in every group."""
    rows = row_slots.shape[0]
    if group_sizes is None:
        ends = jnp.arange(1, groups + 1, dtype=jnp.int32) * (rows // groups)
    else:
        ends = _running_sums(group_sizes.astype(jnp.int32)[None])[0]
    group = count_below(ends, jnp.arange(rows, dtype=jnp.int32))
    slots = jnp.where(group < groups, jnp.maximum(row_slots, -1), -1)
    return Tables(ends, slots.astype(jnp.int32), jnp.minimum(group, groups - 1))


def rows_of_slots(tables: Tables, first: int, ranges) -> Tables:
    """The tables of the rows whose slots some (first slot, count) of `ranges` has; other rows have
    no adapter there. Slots count from `first` on."""
    slots = tables.row_slots
    inside = functools.reduce(
        jnp.logical_or, ((slots >= low) & (slots < low + count) for low, count in ranges)
    )
    return tables._replace(row_slots=jnp.where(inside, slots - first, -1))


class Tasks(NamedTuple):
    """Tasks in row order; int32 arrays as long as there can be tasks.

    Attributes:
      counts: [2], the tasks and the groups that have any.
      tile, group: of each task. The group after the last one owns the rows past the end.
      lo, hi: the task's rows in its tile.
      ordinal: how many groups with tasks come before its group.
      edges: 1 if it is its group's first task, plus 2 if it is its last.
      active: the groups with tasks, ascending; repeats nothing before counts[1].
    """

    counts: jax.Array
    tile: jax.Array
    group: jax.Array
    lo: jax.Array
    hi: jax.Array
    ordinal: jax.Array
    edges: jax.Array
    active: jax.Array


def _running_sums(values):
    """Inclusive sums along the last axis of a small [F, G]: one fused reduction, not a scan."""
    index = jnp.arange(values.shape[1])
    upto = index[:, None] <= index[None, :]
    return jnp.sum(jnp.where(upto, values[:, :, None], 0), axis=1, dtype=jnp.int32)


def row_tasks(ends, rows: int, block_m: int, *, empty_groups: bool = False) -> Tasks:
    """The tasks of all rows, those past the last group included.

    Args:
      ends: int32 [G], ascending, at most `rows`.
      empty_groups: whether a group without rows gets a task (of no rows) too.
    """
    groups, tiles = ends.shape[0], -(-rows // block_m)
    ends = jnp.concatenate([ends, jnp.full(1, rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first_tile = jnp.minimum(starts // block_m, tiles - 1)
    tasks = jnp.where(ends > starts, (ends - 1) // block_m - first_tile + 1, 0)
    longest = tiles + min(groups, rows)
    if empty_groups:
        tasks = jnp.maximum(tasks, jnp.arange(groups + 1) < groups)
        longest = tiles + groups
    real = (tasks > 0) & (jnp.arange(groups + 1) < groups)
    task_ends, filled = _running_sums(jnp.stack([tasks, real.astype(jnp.int32)]))
    # What each task takes from its group: of all groups, the one that its index lies in.
    index = jnp.arange(longest, dtype=jnp.int32)
    first_task = task_ends - tasks
    within = (index[:, None] >= first_task) & (index[:, None] < task_ends)
    of_group = jnp.stack(
        [
            jnp.arange(groups + 1, dtype=jnp.int32),
            starts,
            ends,
            first_tile,
            first_task,
            tasks,
            filled - real,
        ]
    )
    picked = jnp.sum(jnp.where(within, of_group[:, None, :], 0), axis=2, dtype=jnp.int32)
    group, start, end, first_tile, first_task, tasks, ordinal = picked
    offset = index - first_task
    tile = jnp.minimum(first_tile + offset, tiles - 1)
    active = count_below(filled[:-1], jnp.arange(min(groups, longest), dtype=jnp.int32))
    return Tasks(
        counts=jnp.stack([task_ends[-1], filled[-1]]),
        tile=tile,
        group=group,
        lo=jnp.clip(start - tile * block_m, 0, block_m),
        hi=jnp.clip(end - tile * block_m, 0, block_m),
        ordinal=ordinal,
        edges=(offset == 0) + 2 * (offset == tasks - 1).astype(jnp.int32),
        active=jnp.minimum(active, groups - 1),
    )


SLOT, END, GROUP = 0, 1, 2  # the words of a row in the table of runs


def row_runs(tables: Tables, block_m: int, *, by_group: bool):
    """Slot, end of the run, and group of each row.

    Args:
      by_group: whether rows of one slot and different groups are different runs. Stretches of rows
        without an adapter (slot -1, and all rows past the last group) are one run anyway.

    Returns:
      int32 [tiles, 3, block_m]. The end counts from the tile's first row and is at most block_m.
    """
    rows = tables.row_slots.shape[0]
    tiles = -(-rows // block_m)
    padding = tiles * block_m - rows
    slot = jnp.pad(tables.row_slots, (0, padding), constant_values=-1).reshape(tiles, block_m)
    group = jnp.pad(tables.group_of_row, (0, padding)).reshape(tiles, block_m)
    differs = slot[:, 1:] != slot[:, :-1]
    if by_group:
        differs |= (slot[:, 1:] >= 0) & (group[:, 1:] != group[:, :-1])
    row = jnp.arange(block_m, dtype=jnp.int32)
    following = jnp.where(differs, row[1:], block_m)
    end = _smallest_from_here_on(jnp.pad(following, ((0, 0), (0, 1)), constant_values=block_m))
    return jnp.stack([slot, end, group], axis=1).astype(jnp.int32)


def _smallest_from_here_on(values):
    """The minimum of each element of [F, L] and those right of it, by doubling: log L fused steps,
    where comparing all pairs would be L times the work."""
    distance, length = 1, values.shape[1]
    while distance < length:
        shifted = jnp.concatenate([values[:, distance:], values[:, -distance:]], axis=1)
        values, distance = jnp.minimum(values, shifted), 2 * distance
    return values
