"""Packing: everything is there once, and an adapter's pieces do not depend on the others."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_jax.training.datum import Row
from lora_moe_jax.training.packing import HEAD_ROWS, PackSizes, packed, packs, places, smallest

SIZES = [PackSizes(128, 16, 4), PackSizes(512, 16, 4)]


def rows(count: int, names: str, seed: int = 0, longest: int = 120) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        Row(i, str(rng.choice(list(names))), rng.integers(0, 99, n).astype(np.int32), None, {})
        for i, n in enumerate(rng.integers(2, longest, count))
    ]


@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_there_once(seed):
    every = rows(40, "abcdefg", seed)
    slots = {name: i for i, name in enumerate("abcdefg")}
    seen = []
    for pack in packs(every, SIZES[-1]):
        sizes = smallest(pack, SIZES)
        batch = packed(pack, sizes, slots)
        assert len(pack.pieces) <= 4
        used = {}
        for request, (row, place) in enumerate(zip(pack.rows, places(pack), strict=True)):
            seen.append(row.place)
            here = np.flatnonzero(batch.request == request)
            assert (here == np.arange(place.start, place.stop + 1)).all()
            assert (batch.tokens[here] == row.tokens).all()
            assert (batch.targets[place] == row.tokens[1:]).all()
            assert (batch.slots[here] == slots[row.adapter]).all()
            assert (batch.positions[here] == np.arange(row.length)).all()
            own = batch.page_tables[request][: -(-row.length // 16)]
            assert own.max() < sizes.pages and not used.keys() & set(own.tolist())
            used |= dict.fromkeys(own.tolist())
        assert (batch.slots[batch.request < 0] == -1).all()
        chunks = batch.head_rows
        assert chunks.shape[1] == HEAD_ROWS
        predicted = np.concatenate([np.arange(p.start, p.stop) for p in places(pack)])
        assert sorted(chunks[chunks < sizes.tokens]) == sorted(predicted)
        for chunk in chunks:
            assert len(set(batch.slots[chunk[chunk < sizes.tokens]])) <= 1
            assert (np.diff(chunk) >= 0).all() or not (chunk < sizes.tokens).all()
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("seed", range(8))
def test_an_adapters_pieces_are_its_own(seed):
    every = rows(40, "abc", seed)
    own = [row for row in every if row.adapter == "b"]

    def pieces(found) -> list[list[int]]:
        return [[row.place for row in pack.pieces["b"]] for pack in found if "b" in pack.pieces]

    together = pieces(packs(every, SIZES[-1]))
    assert together == pieces(packs(own, SIZES[-1]))
    assert sum(together, []) == [row.place for row in own]
