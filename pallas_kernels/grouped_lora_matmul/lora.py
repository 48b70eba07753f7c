"""The adapter slots of a projection: one pair of arrays for all, or one for each rank class."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from jaxtyping import Array, Float


class Lora(NamedTuple):
    """The adapter slots of one projection, or those of one rank class.

    Attributes:
      a: `[S, G or 1, R, K]`. One matrix per slot and group, or one per slot for all groups
        (a shared outer factor). Rows at and past an adapter's own rank are zero.
      b: `[S, G or 1, R, N]`.
      scaling: float32 `[S, G or 1]`, applied to x·Aᵀ and never folded into B.
    """

    a: Float[Array, "slots a_groups rank k"]
    b: Float[Array, "slots b_groups rank n"]
    scaling: Float[Array, "slots s_groups"]


# Rank classes in order: slots are numbered through all of them.
Slots = Lora | tuple[Lora, ...]


class Term(NamedTuple):
    """One low-rank term of a product: a rank class of one part of the output.

    Attributes:
      start: the part's first column.
      first: the number of the class's first slot.
    """

    start: int
    first: int
    pair: Lora


def classes_of(entry: Slots | None) -> tuple[Lora, ...]:
    """The rank classes of one part; none without adapters."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, Lora) else tuple(entry)


def slot_counts(entry: Slots | None) -> tuple[int, ...]:
    """How many slots each class has."""
    return tuple(pair.a.shape[0] for pair in classes_of(entry))


def first_slots(entry: Slots) -> tuple[int, ...]:
    """The number of each class's first slot."""
    return tuple(itertools.accumulate(slot_counts(entry), initial=0))[:-1]


def has_slot(row_slots, first: int, count: int):
    """Which rows are of one of `count` slots from the first on; in kernels too."""
    return (row_slots >= first) & (row_slots < first + count)


def terms_of_part(start: int, entry: Slots | None) -> tuple[Term, ...]:
    """The terms of a part that starts at a column, one for each class."""
    if entry is None:
        return ()
    classes = zip(first_slots(entry), classes_of(entry), strict=True)
    return tuple(Term(start, first, pair) for first, pair in classes)


def terms_of_parts(parts: tuple[int, ...], lora: tuple[Slots | None, ...]) -> tuple[Term, ...]:
    """All terms: class by class, and inside a class part by part."""
    starts = (sum(parts[:i]) for i in range(len(parts)))
    of_parts = map(terms_of_part, starts, lora)
    by_class = zip(*filter(None, of_parts), strict=True)
    return tuple(itertools.chain.from_iterable(by_class))


def in_form(lora: tuple[Slots | None, ...], pairs) -> tuple[Slots | None, ...]:
    """What belongs to each term of `terms_of_parts`, arranged as `lora` is."""
    of_part = iter(range(len(lora)))
    count = sum(entry is not None for entry in lora)

    def form(entry):
        if entry is None:
            return None
        found = tuple(pairs[next(of_part) :: count])
        return found[0] if isinstance(entry, Lora) else found

    return tuple(map(form, lora))
