"""Configurations of published models by name, for benchmarks: shapes without weights."""

from __future__ import annotations

from pathlib import Path

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.reader import read_config

_FOLDER = Path(__file__).parent / "shapes"
NAMED_CONFIGS = tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def named_config(name: str) -> ModelConfig:
    """The configuration of one of `NAMED_CONFIGS`."""
    return read_config(_FOLDER / f"{name}.json")
