"""The model of `bench serving`, `training` and `mismatch`: the option, and what it names."""

from __future__ import annotations

import argparse

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.named import NAMED_CONFIGS, named_config
from lora_moe_jax.config.reader import read_config


def add_model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="qwen3-30b-a3b",
        help=f"{', '.join(NAMED_CONFIGS)}, or a folder or file with a configuration; weights are "
        "random (default qwen3-30b-a3b)",
    )


def model_config(model: str, layers: int | None = None) -> ModelConfig:
    """What `--model` names; its first `layers` layers alone if given.

    Raises:
      ConfigError: there is no such configuration, or it is not supported.
    """
    config = named_config(model) if model in NAMED_CONFIGS else read_config(model)
    return config if layers is None else config.first_layers(layers)
