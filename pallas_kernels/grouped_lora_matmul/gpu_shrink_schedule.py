"""Which schedule a Hopper shrink runs with: a pure function of static shapes, as `gpu_schedule`."""

from __future__ import annotations

import dataclasses

from pallas_kernels.hopper.machine import ARRAY, HALF_MEMORY, PROGRAMS, SHARED_MEMORY

PIECE = 56  # rows of a run that one unit of a shrink takes at most
BLOCKS_OF_ROWS = 4 * PROGRAMS  # up to so many rows, a unit of a shrink is a block of rows instead
BLOCK_OF_ROWS = 8  # at most, of a unit of a shrink of few rows
SHRINK_STEPS = 4  # blocks of 64 columns in one stage of a shrink
MOST_STAGES = 12  # of a ring
# Where threads gather rows through the L1, which is what stages leave: two, or three of so much.
GATHERED_STAGES, GATHERED_MEMORY = (2, 3), 168 << 10


@dataclasses.dataclass(frozen=True)
class ShrinkSchedule:
    """How one shrink is cut.

    Attributes:
      block: rows of a unit, whatever runs they are in; None: a unit is a piece of a run.
      apart: whether each term is a unit of its own, in columns of u of its own.
      rank_tile: columns that u of a term starts at a multiple of.
      heights: row counts of the compiled variants, ascending multiples of 8.
      stages: how many the ring has.
      programs: persistent programs, one or two for each multiprocessor.
    """

    block: int | None
    apart: bool
    rank_tile: int
    heights: tuple[int, ...]
    stages: int
    programs: int


def whole(count: int, unit: int) -> int:
    """The count up to the next multiple of the unit."""
    return -(-count // unit) * unit


def rank_tile(rank: int) -> int:
    """Columns that u of a term starts at a multiple of: the narrowest swizzle, or the widest."""
    return next(size for size in (16, 32, 64) if rank <= size or size == 64)


def rank_step(rank: int) -> int:
    """Ranks of one low-rank step of a product: with more, the tallest tiles' stages do not fit."""
    return min(32, rank_tile(rank))


def packed_columns(ranks: tuple[int, ...], tile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where each term's ranks start in the packed u, and how many columns it owns."""
    owned = tuple(whole(rank, tile) for rank in ranks)
    return tuple(sum(owned[:term]) for term in range(len(ranks))), owned


def piece_rows(rows: int, groups: int) -> int:
    """The most rows of a piece of a run: of one group, so few that programs' turns are as long."""
    if groups > 1:
        return PIECE
    turns = -(-rows // (PROGRAMS * PIECE))
    return whole(-(-rows // (PROGRAMS * turns)), 8)


def shrink_schedule(
    rows: int,
    ranks: tuple[int, ...],
    tile: int,
    width: int,
    alone: bool = False,
    piece: int = PIECE,
) -> ShrinkSchedule:
    """For `rows` rows and parts of these ranks, in columns of u that start at multiples of `tile`.

    Few rows leave programs idle, and one program loads A of one row for long: parts apart, more
    share it.

    Args:
      width: columns of x of a unit. alone: each part has columns of its own, not all the same.
      piece: the most rows of a piece.
    """
    apart = not alone and len(ranks) > 1 and rows * len(ranks) <= PROGRAMS
    first, owned = packed_columns(ranks, tile)
    if apart:
        rank_blocks = -(-max(ranks) // 64)
    elif alone:
        ends = map(sum, zip(first, owned, strict=True))
        rank_blocks = max(-(-end // 64) - its // 64 for its, end in zip(first, ends, strict=True))
    else:
        rank_blocks = -(-sum(owned) // 64)
    block = 1 if rows <= 2 * PROGRAMS else 2
    by_run = rows > BLOCKS_OF_ROWS
    heights = (BLOCK_OF_ROWS,)
    if by_run:
        heights = *(height for height in (8, 16, 32, 48) if height < piece), piece
    # As if A filled its blocks: more stages gain nothing.
    stage = stage_of_shrink(heights[-1], 64 * rank_blocks)
    free = SHARED_MEMORY - memory_beside_shrink(heights[-1])
    units = rows if by_run else -(-rows // block) * (len(ranks) if apart else 1)
    programs = PROGRAMS
    half = HALF_MEMORY - memory_beside_shrink(heights[-1])
    has_room = half // stage > 1 and width <= half // stage * SHRINK_STEPS * 64
    if not by_run and units > PROGRAMS and has_room:
        # Units of few steps wait more than they load, and half of the memory has room for one.
        free, programs = half, 2 * PROGRAMS
    return ShrinkSchedule(
        None if by_run else block,
        apart,
        tile,
        heights,
        min(MOST_STAGES, free // stage),
        min(programs, units),
    )


def shrink_of_spread(
    shrink: ShrinkSchedule, ranks: tuple[int, ...], row_bytes: int
) -> ShrinkSchedule | None:
    """The same in the kernel that spreads rows; None if there is no room for two stages of both.

    Args:
      shrink: by pieces, of parts of these ranks. row_bytes: of a row of x.
    """
    _, owned = packed_columns(ranks, shrink.rank_tile)
    beside = memory_beside_shrink(shrink.heights[-1]) + 2 * whole(row_bytes, ARRAY)
    stage = stage_of_shrink(shrink.heights[-1], sum(owned))
    least, most = GATHERED_STAGES
    if least * stage > SHARED_MEMORY - beside:
        return None
    room = min(GATHERED_MEMORY, SHARED_MEMORY - beside)
    return dataclasses.replace(shrink, stages=most if most * stage <= room else least)


def stage_of_shrink(height: int, ranks: int) -> int:
    """Bytes of shared memory: some rows' blocks of columns, and those of A's ranks."""
    return (SHRINK_STEPS * height + ranks_of_stage(ranks)) * 128


def ranks_of_stage(ranks: int) -> int:
    """Rows of A in a stage: those of its last block of columns are read as whole 64."""
    return SHRINK_STEPS * ranks + -ranks % 64


def memory_beside_shrink(height: int) -> int:
    """Bytes of shared memory that are not stages: what is to be stored."""
    return 2 * height * 128


def shrink_of_tiles(tile: int) -> ShrinkSchedule:
    """That of down in the kernel of the experts: a unit is a tile of rows."""
    return ShrinkSchedule(None, False, tile, (BLOCK_OF_ROWS,), 2, PROGRAMS)
