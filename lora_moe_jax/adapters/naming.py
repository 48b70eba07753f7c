"""How a written config names what it targets: as briefly as is exact."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np


def cover(wanted: Iterable[str], universe: Iterable[str], shortest: int = 1) -> list[str]:
    """Name endings, of at least `shortest` parts, that match all of `wanted` and nothing else
    of `universe`."""
    wanted = set(wanted)
    taken = {ending for name in set(universe) - wanted for ending in _endings(name)}
    found: dict[str, None] = {}
    for name in sorted(wanted):
        endings = [e for e in _endings(name)[shortest - 1 :] if not e[0].isdecimal()]
        found[next((e for e in endings if e not in taken), name)] = None
    return list(found)


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in reversed(range(len(parts)))]


def alpha_for(scaling: np.float32, rank: int) -> float:
    """The alpha for which alpha / rank is `scaling` in float32: a round number if one will do."""
    exact = float(scaling) * rank  # 24 bits times a small integer: exact in float64
    for digits in (0, 3, 6):
        alpha = round(exact, digits)
        if np.float32(alpha / rank) == scaling:
            return int(alpha) if alpha.is_integer() else alpha
    return exact


def most_common(values: Iterable) -> object:
    return Counter(values).most_common(1)[0][0]


def patterns(values: dict[str, float], default: float) -> dict[str, float]:
    """Regular expressions, no two matching one name, for the names whose value is not `default`.

    One expression for all layers if they agree, else one a layer, else one for each value.
    """
    found: dict[str, float] = {}
    for every_layer, names in _grouped(values, 0).items():
        if len({values[name] for name in names}) == 1:
            found[every_layer] = values[names[0]]
            continue
        for one_layer, members in _grouped(names, 1).items():
            by_value = defaultdict(list)
            for name in members:
                by_value[values[name]].append(name)
            for value, alike in by_value.items():
                found[one_layer if len(by_value) == 1 else _either(alike)] = value
    return {key: value for key, value in found.items() if value != default}


def _grouped(names: Iterable[str], numbers_kept: int) -> dict[str, list[str]]:
    """Names by their expression, in which all but the first numbers are left open."""
    groups = defaultdict(list)
    for name in names:
        parts, kept = [], 0
        for part in name.split("."):
            if part.isdecimal():
                kept += 1
                part = part if kept <= numbers_kept else r"\d+"
            else:
                part = re.escape(part)
            parts.append(part)
        groups[r"\.".join(parts)].append(name)
    return dict(groups)


def _either(names: list[str]) -> str:
    """One expression for names that differ only in their last number, the expert's."""
    parts = [name.split(".") for name in names]
    at = max(i for i, part in enumerate(parts[0]) if part.isdecimal())
    numbers = "|".join(part[at] for part in parts)
    escaped = [re.escape(part) for part in parts[0]]
    escaped[at] = f"({numbers})" if len(parts) > 1 else numbers
    return r"\.".join(escaped)
