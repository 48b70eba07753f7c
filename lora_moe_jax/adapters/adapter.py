"""An adapter in memory, on the host: the same shape whatever layout it was stored in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lora_moe_jax.adapters.config import AdapterConfig


@dataclass(frozen=True)
class LoraPair:
    """The two factors of one projection: y += scaling * (x a^T) b.

    A leading size of 1 on a projection with groups means that all groups share the factor.

    Attributes:
      a: [groups or 1, rank, in] in the file's dtype (float32, bfloat16, float16).
      b: [groups or 1, rank, out]; the transpose of a file's lora_B.
      scaling: float32 [groups or 1]: as many as the factor with more groups has.
      ranks: int32 [groups or 1]; a group's rows at and past its rank are zero in a or in b.
        A group that the adapter does not touch has rank 0 and scaling 0.
    """

    a: np.ndarray
    b: np.ndarray
    scaling: np.ndarray
    ranks: np.ndarray

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    @property
    def num_parameters(self) -> int:
        """Numbers in a and b, with what pads ranks."""
        return self.a.size + self.b.size

    @property
    def nbytes(self) -> int:
        """Bytes of a and b on the host."""
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True)
class Adapter:
    """A whole adapter.

    Attributes:
      pairs: by `Projection.name`.
      layout: how the file stored routed experts: "module" (it has none), "packed", "per_expert",
        "stacked" (3D, nothing shared), "shared_outer" (3D, outer factors shared), or "mixed".
      config: what its `adapter_config.json` said.
      on_disk: whether its factors are in a file, see `disk_copy`.
      base_copies: base weights that came with it, by projection name: see
        `serving.base_copies`.
    """

    pairs: Mapping[str, LoraPair]
    layout: str
    config: AdapterConfig
    on_disk: bool = False
    base_copies: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank of any projection."""
        return max((pair.rank for pair in self.pairs.values()), default=0)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the projections, without repeating the layers: `mlp.experts.up_proj`."""
        return short_names(self.pairs)

    @property
    def num_parameters(self) -> int:
        """Of all pairs."""
        return sum(pair.num_parameters for pair in self.pairs.values())

    @property
    def nbytes(self) -> int:
        """Of all pairs, on the host."""
        return sum(pair.nbytes for pair in self.pairs.values())

    def copied(self) -> Adapter:
        """The same with arrays of its own: their owner may go on training them."""
        pairs = {
            name: LoraPair(*map(np.array, (pair.a, pair.b, pair.scaling, pair.ranks)))
            for name, pair in self.pairs.items()
        }
        return replace(self, pairs=pairs)


def short_names(names: Iterable[str]) -> tuple[str, ...]:
    """Projection names without their layers, each once."""
    return tuple(sorted({name.split(".", 3)[-1] for name in names}))
