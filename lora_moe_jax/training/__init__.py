"""Training of many adapters at once, beside serving, on the engine's own weights and kernels."""

from lora_moe_jax.training.config import LoraConfig
from lora_moe_jax.training.datum import Datum
from lora_moe_jax.training.losses import LOSSES, Loss, LossBatch, grpo_advantages
from lora_moe_jax.training.reports import ForwardBackward, StepReport, TrainingInfo
from lora_moe_jax.training.trainer import Trainer

__all__ = [
    "LOSSES",
    "Datum",
    "ForwardBackward",
    "Loss",
    "LossBatch",
    "LoraConfig",
    "StepReport",
    "Trainer",
    "TrainingInfo",
    "grpo_advantages",
]
