"""Which schedule a Hopper kernel runs with: a pure function of static shapes.

Schedules change times, never bits. NOTES.md has the measurements behind the choices.
"""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels import implementation
from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import (
    BLOCK_OF_ROWS,
    MOST_STAGES,
    SHRINK_STEPS,
    ShrinkSchedule,
    memory_beside_shrink,
    ranks_of_stage,
    stage_of_shrink,
    whole,
)
from pallas_kernels.grouped_lora_matmul.gpu_slices import Slices
from pallas_kernels.grouped_lora_matmul.gpu_tile_heights import likely_heights
from pallas_kernels.hopper.machine import ARRAY, PROGRAMS, SHARED_MEMORY
from pallas_kernels.hopper.store import whole_lines

CHUNK = 32  # rows added and stored at once
TILES = 2  # tiles whose words are in shared memory
TILE_WORDS = 4  # of the table of tiles, 16 bytes: copies begin at multiples of it
LINE = 32  # words of the copy engine's alignment, 128 bytes
STAGES = 4  # of a ring, at least: with three, loads do not keep up
MOST_STAGED = 144  # rows of a tile: with more, four stages do not fit
# Where registers do not move, a consumer has room for the sums of 136.
TALLEST = MOST_STAGED if implementation.REGISTERS_MOVE else 136
LOWEST = 64  # where all rows are one group, and are more than `TALLEST`
TILE_COST = 100  # cycles
TALL_FEATURES = 256  # of W, that a tile of a large group multiplies
TALL = 112  # rows from which runs may be added in place
DEPTH = 4  # blocks of 64 columns in one stage of a product of few tiles
ENOUGH_PROGRAMS = 48  # to draw all that memory has, or nearly so
NARROWEST = 16  # features of a tile
LOWEST_TILE = 8  # rows
MOST_OF_GROUP = 12  # rows on average, of experts in one kernel
BYTES_BESIDE = 2 * BLOCK_OF_ROWS * 128  # of shared memory, that such a shrink has beside stages
ENOUGH_BESIDE = 32  # programs without tiles of a product, for its shrink


@dataclasses.dataclass(frozen=True)
class ProductSchedule:
    """How one product is cut.

    Attributes:
      blocks: 64-feature blocks of each consumer warpgroup (of gate and of up when gated).
      consumers: warpgroups that multiply.
      heights: row counts of the compiled tile variants, ascending multiples of 8.
      depth: blocks of 64 columns of a stage.
      stages: how many the ring has.
      buffers: output buffers of 32 rows of each consumer.
      programs: persistent programs, at most one for each multiprocessor.
      together: tiles that follow each other for one slice of features, so that those of one
        group read W at the same time.
      width: features of each block; with fewer than 64 there is one block (of each part), the rest
        of which is multiplied for nothing, or for u.
      alone: whether each row is a tile, though their groups are equal.
    """

    blocks: int
    consumers: int
    heights: tuple[int, ...]
    depth: int
    stages: int
    buffers: int
    programs: int
    together: int
    width: int = 64
    alone: bool = False

    @property
    def rows_of_tile(self) -> int:
        """The most rows of a tile of equal groups."""
        return 1 if self.alone else self.heights[-1]

    @property
    def features(self) -> int:
        """Output features of a tile (of the gate part alone when gated)."""
        return self.width * self.blocks * self.consumers


def product_schedule(
    rows: int,
    groups: int,
    width: int,
    parts: int = 1,
    out_bytes: int = 2,
    contract: int = 2,
    made_ranks: int = 0,
    equal: bool = False,
    beside: int = 0,
    biased: bool = False,
    alone: bool = False,
    columns: tuple[int, ...] = (),
) -> ProductSchedule:
    """For `rows` rows over `groups` groups, `width` features in each of `parts` parts.

    Args:
      out_bytes: of one element of the result. contract: see `product_kernel`.
      made_ranks: of u, where the product makes it.
      equal: whether groups have equally many rows: tiles of one group are of any height then.
      beside: bytes of shared memory that a shrink has in the same program.
      biased: whether the sums have a bias.
      alone: see `ProductSchedule`.
      columns: of the product's features, between all that a term begins or ends at, where the
        product makes u.
    """
    columns = columns or (width,)
    mean = rows / groups
    heights = (LOWEST_TILE,) if alone else _heights(rows, groups)
    most_tiles = rows if alone else _most_tiles(rows, groups)

    def leaves_idle(features):
        return most_tiles * -(-width // features) <= PROGRAMS // 2

    # Tall tiles multiply 128 features in each warpgroup; low ones only wait for W, and finer
    # slices of features spread it better.
    blocks = 2 if mean > 160 and parts == 1 and not leaves_idle(256) else 1
    consumers, depth = 2, 1
    if leaves_idle(128 * blocks):
        # A dense layer at decode: one program draws but a part of the bandwidth, and takes as long
        # to load a small stage as a large one.
        consumers, depth = 1, DEPTH
    elif mean <= 12:
        active = groups * (1 - (1 - 1 / groups) ** rows)
        wide, narrow = (_last_wave(active * -(-width // (64 * n))) for n in (2, 1))
        consumers = 1 if narrow > wide + 0.08 else 2
    narrow = 64
    if depth > 1 and heights[-1] <= CHUNK and contract == 2:
        if parts > 1:
            narrow = _narrow_gated(width, most_tiles, made_ranks)
        elif groups == 1:
            narrow = _narrow(columns, made_ranks)
    w_rows = parts * blocks * consumers * narrow
    slices = sum(Slices.of(columns, narrow * blocks * consumers).counts)
    if equal and groups == 1 and rows > TALLEST:
        heights = (_height_of_turns(rows, slices, w_rows),)
        most_tiles = -(-rows // heights[-1])
    stage = depth * (block_rows(w_rows, narrow, made_ranks, depth) + heights[-1]) * 128
    words = 4 * TILES * words_of_tile(heights)
    buffer = consumers * min(CHUNK, heights[-1]) * 64 * out_bytes
    free = SHARED_MEMORY - whole(words, ARRAY) - beside
    if biased:
        free -= whole(2 * TILES * parts * blocks * consumers * 64, ARRAY)
    if heights[-1] >= TALL:
        free -= ARRAY  # whether its sums are finite
    if made_ranks:
        free -= whole(consumers * heights[-1] * 128, ARRAY)
    # Two more output buffers help, unless they take a stage that is needed more.
    buffers = 4 if blocks * -(-heights[-1] // CHUNK) > 1 else 2
    if free - whole(4 * buffer, ARRAY) < STAGES * stage:
        buffers = 2
    free -= whole(buffers * buffer, ARRAY)
    if depth > 1 and free // stage < 3:
        depth = 1
        stage = (block_rows(w_rows, narrow, made_ranks, depth) + heights[-1]) * 128
    return ProductSchedule(
        blocks,
        consumers,
        heights,
        depth,
        min(MOST_STAGES, free // stage),
        buffers,
        min(PROGRAMS, most_tiles * slices),
        tiles_together(rows / groups, heights[-1]),
        narrow,
        alone,
    )


def is_read_again(rows: int, width: int) -> bool:
    """Whether each row of a dense layer should be a tile, whose program makes u of it.

    W of so few features costs less again than waiting for those who make u for all: so it is for
    routers. All tiles should begin at once.
    """
    return rows <= LOWEST_TILE and rows * -(-width // NARROWEST) <= PROGRAMS // 2


def experts_schedules(
    rows: int,
    width: int,
    hidden: int,
    made_into: int,
    made_out: int,
    biased: bool = False,
    choice: bool = False,
) -> tuple[ProductSchedule, ProductSchedule, int] | None:
    """Those of gate and up, and of down, of rows that are tiles each, with one ring of stages.

    Args:
      width: features of the gate. hidden: of the result.
      made_into, made_out: ranks of u that the products make.
      biased: whether gate and up have a bias.
      choice: whether the kernel chooses the experts.

    Returns:
      The schedules, and how many rows a block of a stage has; None if too few stages have room, or
      h has columns that nobody makes.
    """
    heights, buffers = (8,), 2
    features = _narrow_gated(width, rows, made_into)
    if not _makes_all_of_h(width, features):
        return None
    # Of each product the words of its tiles and two buffers; u; a bias; words and scores of rows.
    free = SHARED_MEMORY - (7 + biased + 2 * choice) * ARRAY
    for depth in (DEPTH, DEPTH // 2):
        ring_rows = max(
            block_rows(2 * features, features, made_into, depth),
            block_rows(64, 64, made_out, depth),
        )
        stages = free // (depth * (ring_rows + heights[-1]) * 128)
        if stages >= 3:
            break
    else:
        return None

    def schedule(features: int, tiles: int):
        programs = min(PROGRAMS, tiles)
        return ProductSchedule(
            1, 1, heights, depth, min(12, stages), buffers, programs, 1, features
        )

    into, out = rows * -(-width // features), rows * -(-hidden // 64)
    return schedule(features, into), schedule(64, out), ring_rows


def experts_schedules_of_tiles(
    rows: int,
    groups: int,
    width: int,
    hidden: int,
    biased: bool = False,
    shrink: ShrinkSchedule | None = None,
) -> tuple[ProductSchedule, ProductSchedule, int] | None:
    """The same of few rows in tiles of their groups.

    Args:
      shrink: that of down, beside the products, of one block of ranks.

    Returns:
      None where products apart are as good: with more rows, or with so few tiles that each program
      has to draw all that it can; and where h has columns that nobody makes.
    """
    tiles = _most_tiles(rows, groups)
    if rows / groups > MOST_OF_GROUP or tiles * -(-width // 64) < 2 * PROGRAMS:
        return None
    if not _makes_all_of_h(width, 64):
        return None
    heights, buffers, ring_rows = _heights(rows, groups), 2, 128
    words = 4 * TILES * words_of_tile(heights)
    buffer = min(CHUNK, heights[-1]) * 64 * 2
    free = SHARED_MEMORY - 2 * (whole(words, ARRAY) + whole(buffers * buffer, ARRAY))
    if biased:
        free -= whole(2 * TILES * ring_rows, ARRAY)
    if shrink:
        height = shrink.heights[-1]
        free -= shrink.stages * stage_of_shrink(height, 64) + memory_beside_shrink(height)
    stages = min(12, free // ((ring_rows + heights[-1]) * 128))

    def schedule(blocks: int, slices: int):
        programs = min(PROGRAMS, tiles * slices)
        return ProductSchedule(blocks, 1, heights, 1, stages, buffers, programs, 1)

    # 64 features of gate and of up, or 128 of down.
    return schedule(1, -(-width // 64)), schedule(2, -(-hidden // 128)), ring_rows


def _makes_all_of_h(width: int, features: int) -> bool:
    """Whether tiles of so many features fill all lines that h has.

    A stage of down has several blocks of columns. Past K there are zeros in W, and there must be
    zeros in h as well, or nothing: 0 x NaN is NaN, and memory that nobody wrote may be that.
    """
    return -(-width // features) * features >= whole_lines(width, 64)


def _narrow(columns: tuple[int, ...], made_ranks: int) -> int:
    """Features of a tile of a layer of so few that programs of 64 would draw less than memory has.

    With those of u they are one block: also of a layer of more, if all tiles still begin at once.
    A in a block of its own would leave W a stage less, to be on its way before x is there.
    """
    features, width = 64, sum(columns)
    while features > NARROWEST and width // features < ENOUGH_PROGRAMS:
        features //= 2
    while NARROWEST < features < 64 and features + made_ranks > 64:
        features //= 2
    beside = 64 - made_ranks
    if features == 64 and NARROWEST <= beside <= min(columns):
        if sum(Slices.of(columns, beside).counts) <= PROGRAMS:
            return beside
    return features if features + made_ranks <= 64 else 64


def _narrow_gated(width: int, row_tiles: int, made_ranks: int) -> int:
    """Features of a tile, of the gate's part, with which turns of all programs load the least."""

    def rows(features: int) -> int:
        return -(-row_tiles * -(-width // features) // PROGRAMS) * (2 * features + made_ranks)

    return min((64, 48, 32), key=rows)


def block_rows(w_rows: int, width: int, made_ranks: int, depth: int) -> int:
    """Rows of each block of a stage: of W, then of A if the product makes u, and room.

    The tensor cores take 64, from the first of the last `width` features too; stages begin where
    blocks of 64 rows do.
    """
    return whole(max(w_rows + 64 - width, w_rows + made_ranks), 64 // depth)


def _height_of_turns(rows: int, slices: int, w_rows: int) -> int:
    """The height of equal tiles of all rows with which programs, which take turns, end first."""
    fixed, each = _step_time(w_rows)

    def time(tiles: int) -> int:
        height = whole(-(-rows // tiles), 8)
        return -(-tiles * slices // PROGRAMS) * (fixed + each * height)

    best = min(range(-(-rows // TALLEST), rows // LOWEST + 1), key=time)
    return whole(-(-rows // best), 8)


def _step_time(w_rows: int) -> tuple[int, int]:
    """Cycles of a tile's step of K, and more of them for each row of x.

    They are those of its bytes in shared memory, 128 in a cycle: loaded, and read by each product
    of 64 rows of W. What a tile costs besides is taken for `TILE_COST` more in each.
    """
    return 2 * w_rows + TILE_COST, 1 + w_rows // 64


def tiles_together(mean: float, height: int) -> int:
    """How many tiles of a height a group of mean size has, at most 8."""
    return max(1, min(8, round(mean / height)))


def words_of_tile(heights: tuple[int, ...]) -> int:
    """Words of shared memory for a tile: its line of the table, its rows' places and run ends."""
    return LINE + 2 * words_of_rows(heights)


def words_of_rows(heights: tuple[int, ...]) -> int:
    """Words for one number of each row; a copy begins up to a unit before the first."""
    return whole(heights[-1] + TILE_WORDS, LINE)


def _last_wave(tiles: float) -> float:
    """The share of the multiprocessors' time that so many equal tiles use."""
    waves = tiles / PROGRAMS
    return waves / math.ceil(waves)


def tile_height(rows: int, groups: int) -> int:
    """The most rows of a tile; the same for all products of a layer, which share their tiles."""
    return _heights(rows, groups)[-1]


def _most_tiles(rows: int, groups: int) -> int:
    return min(rows, groups - 1 + -(-rows // tile_height(rows, groups)))


def _heights(rows: int, groups: int) -> tuple[int, ...]:
    """Tile variants for so many rows in a group on average."""
    if groups == 1:
        # Equal tiles of all rows: what they have is known.
        return (whole(-(-rows // -(-rows // TALLEST)), 8),)
    mean = rows / groups
    for limit, heights in (
        (1, (8,)),
        (6, (8, 16)),
        (12, (16, 32)),  # a third height would double what Mosaic lowers
        (40, (16, 32, 64)),
        (80, (64, 80, 96)),
    ):
        if mean <= limit:
            return heights
    return likely_heights(mean, TALLEST, *_step_time(TALL_FEATURES))


def shrink_beside(
    shrink: ShrinkSchedule, row_units: int, a_ranks: int, product: ProductSchedule
) -> ShrinkSchedule | None:
    """The same by the programs for which its product has no tiles; None if they cannot have it.

    Args:
      shrink: in units that are blocks of rows. row_units: units with one row each. a_ranks: of a
        unit. product: with the memory that is left beside stages.
    """
    height, programs = shrink.heights[-1], PROGRAMS - product.programs
    stages = _shrink_stages(shrink, a_ranks, product, max(64, product.features))
    if programs < ENOUGH_BESIDE or stages < 2:
        return None
    # A block of rows may be one run, and takes as long as its rows alone if not.
    block = min(height, -(-row_units // programs))
    return dataclasses.replace(shrink, block=block, stages=stages, programs=programs)


def shrink_ahead(
    shrink: ShrinkSchedule, a_ranks: int, product: ProductSchedule, w_rows: int
) -> ShrinkSchedule | None:
    """The same by all programs, before their tiles; None if it cannot be had there.

    So only where every program has tiles: few would take longer than all do.

    Args:
      w_rows: of each block of W in a stage.
    """
    stages = _shrink_stages(shrink, a_ranks, product, w_rows)
    programs = min(PROGRAMS, shrink.programs)
    if shrink.block is None or stages < 2 or programs > product.programs:
        return None
    return dataclasses.replace(shrink, stages=stages, programs=programs)


def _shrink_stages(
    shrink: ShrinkSchedule, a_ranks: int, product: ProductSchedule, w_rows: int
) -> int:
    """How many stages of a shrink the product's have room for."""
    stages = (
        product.stages * product.depth * rows // needed
        for rows, needed in (
            (w_rows, ranks_of_stage(a_ranks)),
            (product.heights[-1], SHRINK_STEPS * shrink.heights[-1]),
        )
    )
    return min(MOST_STAGES, *stages)
