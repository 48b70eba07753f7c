"""Training of many adapters at once, beside serving, on the engine's own weights and kernels."""

from lora_moe_jax.training.config import LoraConfig
from lora_moe_jax.training.data_order import DataOrder
from lora_moe_jax.training.datum import Datum
from lora_moe_jax.training.losses import LOSSES, Loss, LossBatch, grpo_advantages
from lora_moe_jax.training.reports import ForwardBackward, StepReport, TrainingInfo
from lora_moe_jax.training.rl_loop import (
    GrpoConfig,
    GrpoReport,
    GrpoTask,
    TaskReport,
    run_grpo,
)
from lora_moe_jax.training.sft import SftConfig, SftReport, run_sft
from lora_moe_jax.training.sft_data import Example, read_examples
from lora_moe_jax.training.trainer import Trainer

__all__ = [
    "LOSSES",
    "DataOrder",
    "Datum",
    "Example",
    "ForwardBackward",
    "GrpoConfig",
    "GrpoReport",
    "GrpoTask",
    "Loss",
    "LossBatch",
    "LoraConfig",
    "SftConfig",
    "SftReport",
    "StepReport",
    "TaskReport",
    "Trainer",
    "TrainingInfo",
    "grpo_advantages",
    "read_examples",
    "run_grpo",
    "run_sft",
]
