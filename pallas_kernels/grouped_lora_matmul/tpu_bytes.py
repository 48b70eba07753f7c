"""How many bytes the TPU kernels move between HBM and VMEM, over the fewest that there can be.

Counted from the same tables, schedules and block maps that the kernels run by, for one routing; no
TPU is needed. `python -m pallas_kernels.grouped_lora_matmul.tpu_bytes` prints the named shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_lora_matmul import tpu_schedule
from pallas_kernels.grouped_lora_matmul.tpu_schedule import (
    LANES,
    Device,
    ProductShape,
    round_up,
)
from pallas_kernels.grouped_lora_matmul.tpu_tasks import END, SLOT, row_runs, row_tasks, tables
from pallas_kernels.shapes import DECODE_TOKENS, EXPERT_SHAPES, PREFILL_TOKENS, ExpertShape

DEVICES = {
    "v5e": Device(128 << 20),
    "v5p": Device(64 << 20, 2),
    "v6e": Device(128 << 20),
    "tpu7x": Device(64 << 20),
}
ITEM = 2  # bytes of a bfloat16
SlotRange = tuple[int, int]  # the first one, and how many: those of a rank class


class Moved(NamedTuple):
    """Bytes by what they are; `least` is what any kernel of this operation moves."""

    weights: int
    rows: int
    low_rank: int
    tables: int
    least: int

    @property
    def ratio(self) -> float:
        return (self.weights + self.rows + self.low_rank + self.tables) / self.least


class Routing(NamedTuple):
    """Rows in order of group and slot, as `routing_plan` makes them."""

    group_sizes: np.ndarray
    row_slots: np.ndarray


def random_routing(shape: ExpertShape, tokens: int, slots: int, seed: int = 0) -> Routing:
    """Different experts for each token, uniformly; an adapter for each of a few tokens, or of 16
    requests of many."""
    rng = np.random.default_rng(seed)
    experts = rng.random((tokens, shape.experts)).argsort(axis=1)[:, : shape.top_k].reshape(-1)
    if tokens <= 256:
        slot_of_token = rng.integers(0, slots, tokens)
    else:
        slot_of_token = np.repeat(rng.integers(0, slots, 16), -(-tokens // 16))[:tokens]
    row_slots = np.repeat(slot_of_token, shape.top_k)
    order = np.lexsort((row_slots, experts))
    sizes = np.bincount(experts, minlength=shape.experts)
    return Routing(sizes.astype(np.int32), row_slots[order].astype(np.int32))


def product_bytes(
    shape: ProductShape, routing: Routing, device: Device, slots: tuple[SlotRange, ...] = ()
) -> Moved:
    """What one product moves; factors differ by group.

    Args:
      slots: those of each term's factor. Default: all of them, one rank class.
    """
    s = tpu_schedule.product_schedule(shape, device)
    rows, columns = shape.rows, shape.halves * shape.n
    rows_of = _tables(routing)
    tasks = jax.tree.map(np.asarray, _row_tasks(rows_of.ends, rows=rows, block_m=s.block_m))
    count, active = tasks.counts
    tiles = tasks.tile[:count]
    # Blocks of rows arrive when their tile changes; the last tile of rows may be cut short.
    changes = np.concatenate([[True], tiles[1:] != tiles[:-1]])
    rows_of_pass = int(np.minimum(s.block_m, rows - tiles[changes] * s.block_m).sum())
    passes = s.n_tiles if tiles[0] != tiles[-1] else s.cores
    slots = slots or (_all_slots(routing),) * len(shape.terms)
    of_class = {its: _with_slots(routing, its) for its in slots}
    runs = {its: _visits(_tables(rows), s.block_m) for its, rows in of_class.items()}
    buckets = {its: _buckets(rows) for its, rows in of_class.items()}
    x = passes * rows_of_pass * shape.k * shape.x_bytes
    y = rows * shape.n * shape.x_bytes
    u = sum(passes * rows_of_pass * _lanes(rank) * shape.x_bytes for rank, *_ in shape.terms)
    factors, copies = 0, 0
    for (rank, start, width, size), its in zip(shape.terms, slots, strict=True):
        moved = width
        if not tpu_schedule.fits(start % shape.n, width, shape.n, s.n_tiles, s.block_n):
            unit = LANES if s.n_tiles == 1 else s.block_n
            moved = round_up(start % unit + width, unit)
            copies += its[1] * len(routing.group_sizes) * rank * (width + moved) * size
        factors += runs[its] * rank * moved * size
    weights = int(active) * columns * shape.k * shape.w_bytes
    least = weights + rows * (shape.k + shape.n) * shape.x_bytes
    for (rank, _, width, size), its in zip(shape.terms, slots, strict=True):
        adapted = int(np.count_nonzero(of_class[its].row_slots >= 0))
        least += adapted * rank * shape.x_bytes + buckets[its] * rank * width * size
    words = passes * len(set(tiles.tolist())) * 3 * s.block_m * 4 if shape.terms else 0
    return Moved(weights, x + y, u + factors + copies, words, least)


def shrink_bytes(k: int, ranks: tuple[int, ...], routing: Routing, device: Device) -> Moved:
    """What the low-rank inputs of one x move."""
    rows = len(routing.row_slots)
    terms = tuple((rank, k, ITEM) for rank in ranks)
    s = tpu_schedule.shrink_schedule(rows, (k,), ITEM, terms, device)
    rows_of = _tables(routing)
    runs = _visits(rows_of, s.block_m)
    buckets = _buckets(routing)
    x = rows * k * ITEM
    least = x + sum((buckets * k + rows) * rank * ITEM for rank in ranks)
    low_rank = sum((runs * rank * k + rows * _lanes(rank)) * ITEM for rank in ranks)
    return Moved(0, x, low_rank, round_up(rows, s.block_m) * 3 * 4, least)


def outer_bytes(slots: int, rank: int, width: int, routing: Routing, device: Device) -> Moved:
    """What the gradient of one factor moves."""
    rows, groups = len(routing.row_slots), len(routing.group_sizes)
    s = tpu_schedule.outer_schedule(rows, slots, rank, width, ITEM, ITEM, device)
    column_tiles = -(-width // s.block_n)
    right, sums = rows * width * ITEM, slots * groups * rank * width * 4
    left = column_tiles * rows * _lanes(rank) * ITEM
    words = column_tiles * round_up(rows, s.block_m) * 3 * 4
    return Moved(0, right, left + sums, words, right + rows * rank * ITEM + sums)


def _all_slots(routing: Routing) -> SlotRange:
    return 0, int(routing.row_slots.max()) + 1


def _with_slots(routing: Routing, slots: SlotRange) -> Routing:
    """The routing with an adapter in the rows of these slots alone."""
    first, count = slots
    place = routing.row_slots - first
    return routing._replace(row_slots=np.where((place >= 0) & (place < count), place, -1))


def _lanes(columns: int) -> int:
    """Columns as they lie in HBM."""
    return round_up(columns, LANES)


def _buckets(routing: Routing) -> int:
    """How many pairs of a group and a slot have rows."""
    group = np.repeat(np.arange(len(routing.group_sizes)), routing.group_sizes)
    slot = routing.row_slots[: len(group)]
    return len({*zip(group[slot >= 0].tolist(), slot[slot >= 0].tolist(), strict=True)})


def _tables(routing: Routing):
    return tables(
        jnp.asarray(routing.group_sizes), jnp.asarray(routing.row_slots), len(routing.group_sizes)
    )


_row_runs = jax.jit(row_runs, static_argnames=("block_m", "by_group"))
_row_tasks = jax.jit(row_tasks, static_argnames=("rows", "block_m"))


def _visits(rows_of, block_m: int) -> int:
    """How many times a run's factors are fetched: once for each tile that it is in."""
    table = np.asarray(_row_runs(rows_of, block_m=block_m, by_group=True))
    row = np.arange(block_m)
    starts = np.pad(table[:, END, :-1] <= row[1:], ((0, 0), (1, 0)), constant_values=True)
    return int(np.sum(starts & (table[:, SLOT] >= 0)))


def named_shapes(rank: int = 16, slots: int = 8):
    """Yields (name, device name, operation, bytes moved) of every named shape."""
    for shape in EXPERT_SHAPES.values():
        for tokens in (DECODE_TOKENS, PREFILL_TOKENS):
            routing = random_routing(shape, tokens, slots)
            for device_name, device in DEVICES.items():
                for operation, moved in operations(shape, routing, rank, slots, device):
                    yield f"{shape.name} {tokens} tokens", device_name, operation, moved


def named_products(rank: int = 16):
    """Yields (name, static sizes) of every product of the named shapes."""
    for shape in EXPERT_SHAPES.values():
        for tokens in (DECODE_TOKENS, PREFILL_TOKENS):
            for operation, sizes in _products(shape, tokens * shape.top_k, rank):
                yield f"{shape.name} {tokens} tokens {operation}", sizes


def _products(shape: ExpertShape, rows: int, rank: int):
    hidden, wide = shape.hidden, shape.intermediate
    both = ((rank, 0, wide, ITEM), (rank, wide, wide, ITEM))
    to_hidden, to_wide = (rank, 0, hidden, ITEM), (rank, 0, wide, ITEM)
    for operation, k, n, halves, contract, terms in (
        ("gate_up gated", hidden, wide, 2, 2, both),
        ("gate_up", hidden, 2 * wide, 1, 2, both),
        ("down", wide, hidden, 1, 2, (to_hidden,)),
        ("gate_up backward", 2 * wide, hidden, 1, 1, (to_hidden, to_hidden)),
        ("down backward", hidden, wide, 1, 1, (to_wide,)),
    ):
        yield operation, ProductShape(rows, k, n, halves, contract, ITEM, ITEM, terms)


def operations(shape: ExpertShape, routing: Routing, rank, slots, device):
    """Yields (operation, bytes moved) of the products, shrink and outer of one layer."""
    for operation, sizes in _products(shape, len(routing.row_slots), rank):
        yield operation, product_bytes(sizes, routing, device)
    yield "shrink", shrink_bytes(shape.hidden, (rank, rank), routing, device)
    yield "outer", outer_bytes(slots, rank, shape.hidden, routing, device)


def main():
    """Prints one line for each shape and operation, a column for each TPU."""
    lines = {}
    for name, device, operation, moved in named_shapes():
        lines.setdefault((name, operation), {})[device] = moved.ratio
    print(f"{'':52s}" + "".join(f"{device:>8s}" for device in DEVICES))
    for (name, operation), ratios in lines.items():
        print(f"{name:34s}{operation:18s}" + "".join(f"{ratios[d]:8.3f}" for d in DEVICES))


if __name__ == "__main__":
    main()
