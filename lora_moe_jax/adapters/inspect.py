"""What is in an adapter folder, without loading it anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.adapters.reader import read_with_file


@dataclass(frozen=True)
class AdapterSummary:
    """The facts about one adapter.

    Attributes:
      layout: how routed experts are stored, as in `Adapter.layout`.
      targets: projection names without their layers, e.g. "self_attn.q_proj".
      ranks: the different ranks of projections and experts, ascending.
      scaling: smallest and largest scaling in use.
      dtypes: as the file spells them, e.g. ("BF16",).
      num_projections, num_tensors, num_parameters: counts; num_tensors is the file's.
      nbytes: size of the factors in memory.
    """

    layout: str
    targets: tuple[str, ...]
    ranks: tuple[int, ...]
    scaling: tuple[float, float]
    dtypes: tuple[str, ...]
    num_projections: int
    num_tensors: int
    num_parameters: int
    nbytes: int


def describe(
    folder: str | os.PathLike,
    projections: Mapping[str, Projection],
    max_rank: int | None = None,
) -> AdapterSummary:
    """Reads and checks an adapter as `read_adapter` does, and reports what it holds.

    Raises:
      AdapterError: whatever would keep the adapter from being loaded.
    """
    adapter, file = read_with_file(folder, projections, max_rank)
    pairs = adapter.pairs.values()
    ranks = {int(rank) for pair in pairs for rank in pair.ranks}
    scalings = [float(s) for pair in pairs for s in pair.scaling[pair.ranks > 0]]
    return AdapterSummary(
        layout=adapter.layout,
        targets=adapter.targets,
        ranks=tuple(sorted(ranks)),
        scaling=(min(scalings), max(scalings)),
        dtypes=tuple(sorted({info.dtype for info in file.tensors.values()})),
        num_projections=len(adapter.pairs),
        num_tensors=len(file.tensors),
        num_parameters=adapter.num_parameters,
        nbytes=adapter.nbytes,
    )
