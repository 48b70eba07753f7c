"""Which adapter is in which slot, under which name and version."""

from __future__ import annotations

from dataclasses import dataclass

from lora_moe_jax.adapters.names import check_name
from lora_moe_jax.errors import AdapterError


@dataclass(frozen=True)
class AdapterInfo:
    """A loaded adapter. `version` counts the loads under this name, from 1."""

    name: str
    version: int
    slot: int
    rank: int
    layout: str
    targets: tuple[str, ...]
    nbytes: int


class AdapterRegistry:
    """Names and slots. Versions of a name keep counting after it was unloaded."""

    def __init__(self, slots: int):
        self._free = list(range(slots))
        self._loaded: dict[str, AdapterInfo] = {}
        self._versions: dict[str, int] = {}

    def __iter__(self):
        return iter(self._loaded.values())

    def get(self, name: str) -> AdapterInfo:
        """Raises AdapterError for a name that is not loaded."""
        check_name(name)
        if name not in self._loaded:
            raise AdapterError(
                "no adapter of this name is loaded",
                key=name,
                expected=f"one of {sorted(self._loaded) or 'none: no adapter is loaded'}",
                found=name,
                hint="load it with load_adapter",
            )
        return self._loaded[name]

    def slot_for(self, name: str) -> int:
        """The slot this name has, or the next free one. Changes nothing."""
        check_name(name)
        if name in self._loaded:
            return self._loaded[name].slot
        if not self._free:
            raise AdapterError(
                "every adapter slot is taken",
                key=name,
                expected=f"at most {len(self._loaded)} adapters",
                found=f"{len(self._loaded) + 1} with this one",
                hint="unload_adapter one of "
                f"{sorted(self._loaded)}, or build the engine with a larger max_adapters",
            )
        return self._free[0]

    def add(self, name: str, slot: int, **facts) -> AdapterInfo:
        """Records that `name` is now in `slot`."""
        if slot in self._free:
            self._free.remove(slot)
        self._versions[name] = self._versions.get(name, 0) + 1
        info = AdapterInfo(name=name, slot=slot, version=self._versions[name], **facts)
        self._loaded[name] = info
        return info

    def remove(self, name: str) -> AdapterInfo:
        """Forgets a name and frees its slot."""
        info = self.get(name)
        del self._loaded[name]
        self._free.append(info.slot)
        self._free.sort()
        return info
