"""Train and serve many LoRA adapters at once over one Mixture-of-Experts / MLA base model."""

from lora_moe_jax.adapters import Adapter, read_adapter, write_adapter
from lora_moe_jax.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    LoraMoeError,
    RequestError,
)
from lora_moe_jax.serving.async_engine import AsyncEngine
from lora_moe_jax.serving.compile_guard import LateCompileError
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.request import Completion, Delta, FinishReason, Score
from lora_moe_jax.serving.sampling_params import SamplingParams

__all__ = [
    "Adapter",
    "AdapterError",
    "AsyncEngine",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Delta",
    "Engine",
    "FinishReason",
    "LateCompileError",
    "LoraMoeError",
    "RequestError",
    "SamplingParams",
    "Score",
    "read_adapter",
    "write_adapter",
]
