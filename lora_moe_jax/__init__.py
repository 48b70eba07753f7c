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
from lora_moe_jax.serving.queue_limit import QueueFullError
from lora_moe_jax.serving.request import Completion, Delta, FinishReason, Score
from lora_moe_jax.serving.sampling_params import SamplingParams
from lora_moe_jax.serving.sleep import EngineAsleepError, EngineBusyError
from lora_moe_jax.serving.steps import CacheLostError
from lora_moe_jax.serving.stream import RequestStream
from lora_moe_jax.training import (
    DataOrder,
    Datum,
    ForwardBackward,
    GrpoConfig,
    GrpoReport,
    GrpoTask,
    LoraConfig,
    Loss,
    LossBatch,
    SftConfig,
    SftReport,
    StepReport,
    TaskReport,
    Trainer,
    TrainingInfo,
    grpo_advantages,
    read_examples,
    run_grpo,
    run_sft,
)
from lora_moe_jax.version import __version__

__all__ = [
    "__version__",
    "Adapter",
    "AdapterError",
    "AsyncEngine",
    "CacheLostError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DataOrder",
    "Datum",
    "Delta",
    "Engine",
    "EngineAsleepError",
    "EngineBusyError",
    "FinishReason",
    "GrpoConfig",
    "GrpoReport",
    "GrpoTask",
    "ForwardBackward",
    "LateCompileError",
    "LoraConfig",
    "LoraMoeError",
    "Loss",
    "LossBatch",
    "QueueFullError",
    "RequestError",
    "RequestStream",
    "SamplingParams",
    "Score",
    "SftConfig",
    "SftReport",
    "StepReport",
    "TaskReport",
    "Trainer",
    "TrainingInfo",
    "grpo_advantages",
    "read_adapter",
    "read_examples",
    "run_grpo",
    "run_sft",
    "write_adapter",
]
