"""Packs sequences of many adapters into flat batches of few shapes.

An adapter's sequences are cut into pieces first, in their order, by themselves; then pieces of
different adapters share a batch, at most one piece of each. So the sums that make up an adapter's
gradient do not depend on which other adapters are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lora_moe_jax.training.datum import Row

HEAD_ROWS = 256  # tokens whose logits are there at a time
MIN_SEQUENCES = 8


@dataclass(frozen=True)
class PackSizes:
    """Static sizes of a batch of `tokens` tokens, with up to `slots` adapters."""

    tokens: int
    page_size: int
    slots: int

    @property
    def sequences(self) -> int:
        """The most sequences: the shorter they are, the less is a batch filled."""
        return max(MIN_SEQUENCES, self.tokens // 128)

    @property
    def pages(self) -> int:
        """Cache pages of a layer: every sequence begins a page."""
        return self.tokens // self.page_size + self.sequences

    @property
    def head_chunks(self) -> int:
        """Chunks of `HEAD_ROWS` tokens, none of them with tokens of two adapters."""
        return self.tokens // HEAD_ROWS + min(self.slots, self.sequences)

    def hold(self, rows: Sequence[Row], adapters: int) -> bool:
        """Whether rows of so many adapters fit."""
        tokens = _tokens(rows) <= self.tokens
        return tokens and len(rows) <= self.sequences and adapters <= self.slots


class PackedBatch(NamedTuple):
    """What the compiled functions take; T tokens, B sequences.

    Attributes:
      tokens, slots, request, positions: int32 [T]; slot and request are -1 for padding.
      targets: int32 [T], the token after each.
      page_tables: int32 [B, pages of a sequence].
      head_rows: int32 [chunks, HEAD_ROWS], the tokens whose next token is predicted, by adapter; T
        where there is none.
    """

    tokens: np.ndarray
    slots: np.ndarray
    request: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    page_tables: np.ndarray
    head_rows: np.ndarray


@dataclass
class Pack:
    """Rows that go into one batch, by adapter."""

    pieces: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """All of them in the order in which they lie in the batch."""
        return [row for piece in self.pieces.values() for row in piece]

    def fits(self, piece: list[Row], sizes: PackSizes) -> bool:
        return sizes.hold(self.rows + piece, len(self.pieces) + 1)


def packs(rows: Sequence[Row], sizes: PackSizes) -> list[Pack]:
    """Every row in one pack, each no larger than `sizes`."""
    by_adapter: dict[str, list[Row]] = {}
    for row in rows:
        by_adapter.setdefault(row.adapter, []).append(row)
    found: list[Pack] = []
    for adapter, own in by_adapter.items():
        first = 0  # an adapter's pieces are computed in their order
        for piece in _pieces(own, sizes):
            at = next((i for i in range(first, len(found)) if found[i].fits(piece, sizes)), None)
            if at is None:
                at = len(found)
                found.append(Pack())
            found[at].pieces[adapter] = piece
            first = at + 1
    return found


def smallest(pack: Pack, sizes: Sequence[PackSizes]) -> PackSizes:
    """The first of the ascending sizes that holds the pack."""
    return next(size for size in sizes if size.hold(pack.rows, len(pack.pieces)))


def padding(sizes: PackSizes) -> PackedBatch:
    """The arrays of no rows."""
    size, pages = sizes.tokens, -(-sizes.tokens // sizes.page_size)
    return PackedBatch(
        tokens=np.zeros(size, np.int32),
        slots=np.full(size, -1, np.int32),
        request=np.full(size, -1, np.int32),
        positions=np.zeros(size, np.int32),
        targets=np.zeros(size, np.int32),
        page_tables=np.zeros((sizes.sequences, pages), np.int32),
        head_rows=np.full((sizes.head_chunks, HEAD_ROWS), size, np.int32),
    )


def packed(pack: Pack, sizes: PackSizes, slots: Mapping[str, int]) -> PackedBatch:
    """The arrays of a pack, with the slot of each adapter."""
    batch, start, first_page = padding(sizes), 0, 0
    pages = batch.page_tables.shape[1]
    for request, row in enumerate(pack.rows):
        here = slice(start, start + row.length)
        batch.tokens[here] = row.tokens
        batch.slots[here] = slots[row.adapter]
        batch.request[here] = request
        batch.positions[here] = np.arange(row.length)
        batch.targets[here][:-1] = row.tokens[1:]
        batch.page_tables[request] = np.minimum(first_page + np.arange(pages), sizes.pages - 1)
        start += row.length
        first_page += -(-row.length // sizes.page_size)
    _fill_head_rows(batch.head_rows, pack)
    return batch


def places(pack: Pack) -> list[slice]:
    """Where in the flat batch the predictions of each row's tokens lie."""
    ends = np.cumsum([row.length for row in pack.rows]).tolist()
    return [slice(end - row.length, end - 1) for row, end in zip(pack.rows, ends, strict=True)]


def _fill_head_rows(head_rows: np.ndarray, pack: Pack) -> None:
    where, chunk = iter(places(pack)), 0
    for piece in pack.pieces.values():
        of_piece = itertools.islice(where, len(piece))
        rows = np.concatenate([np.arange(place.start, place.stop) for place in of_piece])
        used = -(-len(rows) // HEAD_ROWS)
        head_rows[chunk : chunk + used].reshape(-1)[: len(rows)] = rows
        chunk += used


def _pieces(rows: list[Row], sizes: PackSizes) -> list[list[Row]]:
    """One adapter's rows in their order, cut where the next one would not fit."""
    found: list[list[Row]] = [[]]
    for row in rows:
        full = _tokens(found[-1]) + row.length > sizes.tokens or len(found[-1]) == sizes.sequences
        if full:
            found.append([])
        found[-1].append(row)
    return found


def _tokens(rows: list[Row]) -> int:
    return sum(row.length for row in rows)
