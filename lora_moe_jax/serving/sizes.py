"""What an engine takes of a device's memory, known before any of it is taken."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from lora_moe_jax.errors import ConfigError
from lora_moe_jax.layers.adapter_slots import LoraParam
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.parallel.sharding import named_sharding, sharding_rules
from lora_moe_jax.serving.options import EngineOptions
from lora_moe_jax.serving.steps import page_shapes

_HINTS = {
    "bank": (
        "max_adapters",
        "lower max_adapters or max_rank, let few slots have the largest rank "
        "(max_rank={16: 6, 64: 2}), name fewer target_modules, or set shared_outer",
    ),
    "cache": ("cache_tokens", "lower cache_tokens, max_requests or max_length"),
    "weights": ("mesh", "split the model over more devices with a mesh"),
}


MORE_MEMORY = "or, if this is a GPU, set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: JAX takes 0.75 of it"


@dataclass(frozen=True)
class MemorySizes:
    """Bytes on each device. What a step needs while it runs is not in them."""

    weights: int
    bank: int
    cache: int

    @classmethod
    def of(cls, model: Decoder, options: EngineOptions, mesh: Mesh | None) -> MemorySizes:
        """Of a model, which may be abstract, and its cache."""
        rules = sharding_rules(model.config, mesh)
        sizes = {LoraParam: 0, nnx.Param: 0}
        for _, variable in nnx.to_flat_state(nnx.state(model)):
            axes = variable.get_metadata("axes")
            sharding = None if mesh is None else named_sharding(axes, rules, mesh)
            kind = LoraParam if isinstance(variable, LoraParam) else nnx.Param
            sizes[kind] += _bytes(variable.shape, variable.dtype, sharding)
        pages = page_shapes(
            model,
            model.config,
            mesh,
            pages=options.pages,
            page_size=options.page_size,
            dtype=options.dtype,
        )
        cache = sum(_bytes(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(pages))
        return cls(sizes[nnx.Param], sizes[LoraParam], cache)

    def check(self, free: int | None, parts: Iterable[str] = ("weights", "bank", "cache")) -> None:
        """Raises ConfigError if these parts do not fit into `free` bytes; None is not known."""
        sizes = {part: getattr(self, part) for part in parts}
        if free is None or sum(sizes.values()) <= free:
            return
        # Weights are what they are, so the larger of the others is to blame if they fit.
        others = [part for part in sizes if part != "weights"]
        blame = max(others, key=sizes.__getitem__)
        if sizes.get("weights", 0) > free:
            blame = "weights"
        key, hint = _HINTS[blame]
        raise ConfigError(
            "the engine does not fit into the memory of a device",
            key=key,
            expected=f"at most {_shown(free)}, which is free",
            found=" + ".join(f"{part} {_shown(size)}" for part, size in sizes.items())
            + f" = {_shown(sum(sizes.values()))}",
            hint=f"{hint}; {MORE_MEMORY}",
        )

    def show(self) -> None:
        """Prints one line for each part on stderr."""
        console = Console(stderr=True)
        for part in ("weights", "bank", "cache"):
            console.print(f"{part:<8} {_shown(getattr(self, part)):>12}", highlight=False)


def free_bytes(mesh: Mesh | None) -> int | None:
    """Free memory of the fullest device that is used; None where devices do not say.

    Of a CPU all that the machine has: what is free there nobody knows, as caches give way.
    """
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in each for each in stats):
        on_cpu = jax.default_backend() == "cpu" and hasattr(os, "sysconf")
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if on_cpu else None
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)


def _bytes(shape, dtype, sharding) -> int:
    local = shape if sharding is None else sharding.shard_shape(tuple(shape))
    return math.prod(local) * np.dtype(dtype).itemsize


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
