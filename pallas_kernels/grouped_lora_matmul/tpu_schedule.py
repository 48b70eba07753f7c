"""How the TPU kernels are cut: pure functions of static shapes and the core's memory.

A schedule moves work between tiles and changes the bytes that are read; it never changes a
result's bits, because every sum over K is taken in steps of `K_STEP` columns, in order.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

K_STEP = 1024  # columns of one step of a sum over K; the same in every schedule
PIECE = 512  # rows of W in one copy; a step of the sum over K when contract is 1
LANES = 128
ROW_ALIGN = 16  # rows of a bfloat16 register tile: where a window of rows may start
MAX_BLOCK_M = 512
HEIGHTS = (64, 128, 256)  # rows of the windows of a product with W: few, or enough for the MXU
RUN_HEIGHTS = (16, 128)  # rows of the windows of a run: one slot's rows may be very few
SMEM = 1 << 20  # bytes of scalar memory of one core, on every generation
TASK_BYTES = 7 * 4  # of one task in the tables of `row_tasks`
COPIES_IN_FLIGHT = 8 << 20  # bytes of small copies that hide a copy's latency


@dataclasses.dataclass(frozen=True)
class Device:
    """What a schedule needs to know of a TPU.

    Attributes:
      vmem: bytes of vector memory of one core.
      cores: cores that one kernel runs on (2 on v4 and v5p).
    """

    vmem: int = 64 << 20
    cores: int = 1

    @property
    def limit(self) -> int:
        """Bytes that a kernel may ask the compiler for."""
        return self.vmem * 15 // 16

    @property
    def budget(self) -> int:
        """Bytes of a schedule's own buffers; the rest is the compiler's."""
        return self.vmem * 13 // 16


def current_device() -> Device:
    """The TPU that is compiled for; the smallest current one where there is none (interpreter)."""
    if not pltpu.is_tpu_device():
        return Device()
    info = pltpu.get_tpu_info()
    return Device(info.vmem_capacity_bytes, info.num_cores)


class ProductShape(NamedTuple):
    """Static sizes of one product.

    Attributes:
      n: output columns of one half: of gate alone when gated.
      halves: 2 when gated.
      contract: the axis of W that is summed over, 2 or 1.
      terms: (rank, first column, columns, bytes of one element) of each low-rank term.
    """

    rows: int
    k: int
    n: int
    halves: int
    contract: int
    x_bytes: int
    w_bytes: int
    terms: tuple[tuple[int, int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class ProductSchedule:
    """Attributes:
    block_m: rows of a tile.
    heights, run_heights: row counts of the compiled windows of a tile and of a run, ascending
      powers of two.
    n_tiles: column tiles; x is read once for each. A multiple of cores.
    block_n: columns of a column tile (of one half).
    piece: rows of W in one copy: output columns when contract is 2, else a part of K.
    pieces: copies of one group's column tile.
    ring: pieces that VMEM holds.
    run_buffers: low-rank factors that VMEM holds for each term.
    """

    block_m: int
    heights: tuple[int, ...]
    run_heights: tuple[int, ...]
    n_tiles: int
    block_n: int
    piece: int
    pieces: int
    ring: int
    run_buffers: int
    cores: int


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def tile_rows(rows: int, most: int = MAX_BLOCK_M) -> int:
    """Rows of a tile: a power of two that holds all rows, if there are few."""
    return max(ROW_ALIGN, min(most, 1 << (rows - 1).bit_length()))


def window_heights(block_m: int, heights: tuple[int, ...]) -> tuple[int, ...]:
    """Those that fit a tile; the tile's own height when it is lower than all."""
    return tuple(height for height in heights if height <= block_m) or (block_m,)


def tasks_fit(rows: int, block_m: int) -> bool:
    """Whether scalar memory holds the tasks of all tiles, with room for those of the groups."""
    return -(-rows // block_m) * TASK_BYTES <= SMEM // 2


def check_scalings(count: int):
    """Raises NotImplementedError if scalar memory cannot hold so many scalings of one shrink."""
    if count * 4 > SMEM * 7 // 8:
        raise NotImplementedError(
            f"{count} scalings of slots and groups do not fit in the {SMEM >> 10} KiB of SMEM"
        )


def padded_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of a matrix in VMEM."""
    return round_up(rows, 32 // itemsize) * round_up(columns, LANES) * itemsize


def run_buffer_count(bytes_of_run: int) -> int:
    """Low-rank factors to hold at once, so that copies of small ones overlap."""
    return max(2, min(16, COPIES_IN_FLIGHT // max(bytes_of_run, 1)))


def product_schedule(shape: ProductShape, device: Device) -> ProductSchedule:
    """The fewest column tiles that leave room to fetch a quarter of the next group's weights ahead.

    Then the tallest row tiles, then the deepest ring. Where no tiles leave as much room (an axis
    that cannot be cut), one piece ahead has to do, and lower row tiles.

    Raises:
      NotImplementedError: nothing fits.
    """
    tallest = tile_rows(shape.rows)
    heights = [height for height in (512, 256, 128, 64, 32, 16) if height <= tallest]
    heights = [height for height in heights if tasks_fit(shape.rows, height)]
    preferred = [height for height in heights if height >= min(256, tallest)]
    cuts = _column_cuts(shape, device)
    for few_ahead in (False, True):
        for cut in cuts:
            ahead = 1 if few_ahead else max(1, cut.pieces // 4)
            found = _deepest(shape, device, cut, heights if few_ahead else preferred, ahead)
            if found is not None:
                return found
    raise NotImplementedError(
        f"the tiles of {shape} do not fit in the {device.vmem >> 20} MiB of VMEM of this TPU, "
        f"or their tasks in its {SMEM >> 10} KiB of SMEM"
    )


class _Cut(NamedTuple):
    """Column tiles; see `ProductSchedule`."""

    n_tiles: int
    block_n: int
    piece: int
    pieces: int


def _deepest(shape, device, cut: _Cut, heights, least_ahead):
    """The tallest row tile, then the deepest ring that fits; None if none does."""
    for block_m in heights:
        for ring in range(2 * cut.pieces, cut.pieces + least_ahead - 1, -1):
            schedule = _schedule(shape, device, block_m, cut, ring)
            if product_vmem(shape, schedule) <= device.budget:
                return schedule
    return None


def _schedule(shape, device, block_m, cut: _Cut, ring):
    run_bytes = sum(padded_bytes(r, min(w, cut.block_n), size) for r, _, w, size in shape.terms)
    return ProductSchedule(
        block_m=block_m,
        heights=window_heights(block_m, HEIGHTS),
        run_heights=window_heights(block_m, RUN_HEIGHTS),
        n_tiles=cut.n_tiles,
        block_n=cut.block_n,
        piece=cut.piece,
        pieces=cut.pieces,
        ring=ring,
        run_buffers=run_buffer_count(run_bytes),
        cores=device.cores if cut.n_tiles % device.cores == 0 else 1,
    )


def _column_cuts(shape: ProductShape, device: Device) -> list[_Cut]:
    """The ways to cut columns: those that keep all cores busy first, then those that low-rank
    factors need not be padded for, then the fewest tiles.

    A copy's last two sizes must be whole register tiles or the whole axis, so an odd axis stays
    whole.
    """
    cuts = _cuts_of_backward(shape) if shape.contract == 1 else _cuts_of_forward(shape)

    def rank(cut: _Cut):
        padded = sum(
            not fits(start % shape.n, width, shape.n, cut.n_tiles, cut.block_n)
            for _, start, width, _ in shape.terms
        )
        return cut.n_tiles % device.cores != 0, padded

    return sorted(cuts, key=rank)


def fits(start: int, width: int, n: int, n_tiles: int, block_n: int) -> bool:
    """Whether columns [start, start + width) of n can be copied for each column tile alone.

    They start with a tile (or, of one tile, with a lane tile), and end with one or lie in one; the
    last tile's may be fewer, in whole lane tiles.
    """
    if n_tiles == 1:
        return start % LANES == 0
    if start % block_n:
        return False
    at_the_end = start + width == n and width % LANES == 0
    return width <= block_n or width % block_n == 0 or at_the_end


def _cuts_of_forward(shape) -> list[_Cut]:
    sublanes = 32 // shape.w_bytes
    if shape.n < LANES or shape.n % sublanes:
        return [_Cut(1, shape.n, shape.n, 1)]
    cuts = set()
    for piece in range(LANES, PIECE // shape.halves + 1, LANES):
        total = -(-shape.n // piece)
        for n_tiles in range(1, total + 1):
            if total % n_tiles == 0:
                pieces = total // n_tiles
                cuts.add(_Cut(n_tiles, pieces * piece, piece, pieces))

    def cost(cut: _Cut):
        """Few columns past N, but not dots so narrow that loading rows dominates."""
        return cut.block_n * (1 + 32 / (shape.halves * cut.piece))

    return sorted(cuts, key=lambda cut: (cut.n_tiles, cost(cut)))


def _cuts_of_backward(shape) -> list[_Cut]:
    sublanes = 32 // shape.w_bytes
    piece = PIECE if shape.k % sublanes == 0 and shape.k > PIECE else shape.k
    pieces = -(-shape.k // piece)
    if shape.n % LANES:
        return [_Cut(1, shape.n, piece, pieces)]
    blocks = shape.n // LANES
    widths = {-(-blocks // tiles) for tiles in range(1, blocks + 1)}
    return [
        _Cut(-(-blocks // width), width * LANES, piece, pieces)
        for width in sorted(widths, reverse=True)
    ]


def product_vmem(shape: ProductShape, schedule: ProductSchedule) -> int:
    """Bytes of all buffers of the product kernel."""
    s, halves = schedule, shape.halves
    if shape.contract == 2:
        piece = halves * padded_bytes(round_up(s.piece, ROW_ALIGN), shape.k, shape.w_bytes)
    else:
        piece = padded_bytes(s.piece, s.block_n, shape.w_bytes)
    total = s.ring * piece
    total += 2 * padded_bytes(s.block_m, shape.k, shape.x_bytes)
    total += 2 * padded_bytes(s.block_m, s.block_n, shape.x_bytes)
    total += halves * padded_bytes(s.block_m, s.block_n, 4)
    for rank, _, width, size in shape.terms:
        total += 2 * padded_bytes(s.block_m, rank, shape.x_bytes)
        total += s.run_buffers * padded_bytes(rank, min(width, s.block_n), size)
    return total


@dataclasses.dataclass(frozen=True)
class ShrinkSchedule:
    """Rows of a tile, heights of its windows, and low-rank factors that VMEM holds."""

    block_m: int
    heights: tuple[int, ...]
    run_buffers: int


def shrink_schedule(rows, widths, x_bytes, terms, device: Device) -> ShrinkSchedule:
    """The tallest tile that fits and leaves one to each core.

    Args:
      widths: columns of each different x. terms: (rank, width, bytes of an element) each.

    Raises:
      NotImplementedError: nothing fits.
    """
    run_bytes = sum(padded_bytes(rank, width, size) for rank, width, size in terms)
    block_m = tile_rows(-(-rows // device.cores), 2 * MAX_BLOCK_M)
    while block_m >= ROW_ALIGN:
        buffers = run_buffer_count(run_bytes)
        while buffers >= 2:
            total = buffers * run_bytes
            total += 2 * sum(padded_bytes(block_m, width, x_bytes) for width in widths)
            total += 2 * sum(padded_bytes(block_m, rank, x_bytes) for rank, _, _ in terms)
            if total <= device.budget:
                return ShrinkSchedule(block_m, window_heights(block_m, RUN_HEIGHTS), buffers)
            buffers //= 2
        block_m //= 2
    raise NotImplementedError(f"rows of {widths} and factors of {terms} do not fit in VMEM")


@dataclasses.dataclass(frozen=True)
class OuterSchedule:
    """Rows and columns of a tile, and heights of its windows."""

    block_m: int
    block_n: int
    heights: tuple[int, ...]


def outer_schedule(rows, slots, rank, width, left_bytes, right_bytes, device) -> OuterSchedule:
    """The widest tile whose sums of all slots fit, of as many tiles as cores if there can be.

    Raises:
      NotImplementedError: nothing fits.
    """
    tallest = tile_rows(rows)
    shared = round_up(-(-width // device.cores), LANES)
    widths = [size for size in (shared, 4096, 2048, 1024, 512, 256, 128) if size < width]
    widths = widths if device.cores > 1 and widths else [width, *widths]
    for block_n in widths:
        for block_m in (tallest, min(tallest, 128)):
            total = 2 * slots * padded_bytes(rank, block_n, 4)
            total += 2 * padded_bytes(block_m, block_n, right_bytes)
            total += 2 * padded_bytes(block_m, rank, left_bytes)
            if total <= device.budget and tasks_fit(rows, block_m):
                return OuterSchedule(block_m, block_n, window_heights(block_m, RUN_HEIGHTS))
    raise NotImplementedError(
        f"the sums of {slots=} of {rank=} do not fit in VMEM, or the tasks of {rows=} in SMEM"
    )


def itemsize(dtype) -> int:
    return jnp.dtype(dtype).itemsize
