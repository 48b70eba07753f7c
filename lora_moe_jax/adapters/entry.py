"""What a pool knows of an adapter: one version of it, and what is said of that."""

from __future__ import annotations

from dataclasses import dataclass

from lora_moe_jax.adapters.adapter import Adapter
from lora_moe_jax.adapters.device_params import InSlot


@dataclass(frozen=True)
class AdapterInfo:
    """What was known of an adapter when it was asked for.

    Attributes:
      version: counts the loads under this name, from 1.
      slot: where it is on the device; None while it is in host memory alone.
      layout: as in `Adapter.layout`; "device" for a version that came from there.
      nbytes: of the host copy; 0 while there is none.
      pinned: whether it keeps its slot.
      on_disk: whether the host copy is in a file in place of memory.
    """

    name: str
    version: int
    slot: int | None
    rank: int
    layout: str
    targets: tuple[str, ...]
    nbytes: int
    pinned: bool = False
    on_disk: bool = False


@dataclass(eq=False)
class Entry:
    """One version of an adapter.

    Attributes:
      info: what is known of it now.
      adapter: the host copy, or what stands for it while the values are in the slot alone; None
        once nothing can need it any more.
      requests: how many unfinished requests began with it.
      running: how many of them run; it keeps its slot while any does.
      last_used: a count that grows with every use of any entry.
      successor: the version that has taken its slot and its requests.
    """

    info: AdapterInfo
    adapter: Adapter | InSlot | None
    requests: int = 0
    running: int = 0
    last_used: int = 0
    successor: Entry | None = None

    @property
    def slot(self) -> int | None:
        """Its slot now; None if it has none."""
        return self.info.slot

    @property
    def is_lost(self) -> bool:
        """Whether its values are nowhere: they have no copy, and writing them has failed."""
        return isinstance(self.adapter, InSlot) and self.slot is None
