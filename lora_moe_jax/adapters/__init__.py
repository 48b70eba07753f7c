"""LoRA adapters: on disk in every layout in use, in memory in one."""

from lora_moe_jax.adapters.adapter import Adapter, LoraPair
from lora_moe_jax.adapters.config import AdapterConfig
from lora_moe_jax.adapters.inspect import AdapterSummary, describe
from lora_moe_jax.adapters.names import check_name
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.adapters.reader import read_adapter
from lora_moe_jax.adapters.writer import write_adapter

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterSummary",
    "LoraPair",
    "Projection",
    "check_name",
    "describe",
    "read_adapter",
    "write_adapter",
]
