"""What is in a model or adapter folder, and what it costs to serve; read from headers."""

from __future__ import annotations

import math
from pathlib import Path

import jax
from flax import nnx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lora_moe_jax.adapters.config import CONFIG_FILE
from lora_moe_jax.adapters.inspect import describe
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import AdapterError, ConfigError
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import abstract_model, iter_slots, projections


def inspect_folder(
    console: Console, folder: Path, base: Path, max_rank: int, max_adapters: int
) -> None:
    """Prints a table about an adapter folder or a model folder.

    Args:
      base: the model folder that an adapter is for.
      max_rank, max_adapters: sizes of the bank to report.

    Raises:
      AdapterError, CheckpointError, ConfigError: why it would be refused.
    """
    is_adapter = (folder / CONFIG_FILE).is_file()  # some have their base's config.json beside it
    if (folder / "config.json").is_file() and not is_adapter:
        _print_model(console, folder, max_rank, max_adapters)
    elif folder.is_dir():
        _print_adapter(console, folder, base, max_rank)
    else:
        raise ConfigError(
            "there is no such folder",
            file=folder,
            expected="a folder with config.json (a model) or adapter_config.json (an adapter)",
            found="a file" if folder.is_file() else "nothing",
        )


def _print_adapter(console: Console, folder: Path, base: Path, max_rank: int) -> None:
    model = abstract_model(read_config(base), adapters=SlotConfig(1, max_rank))
    try:
        summary = describe(folder, projections(model), max_rank)
    except AdapterError as error:
        other = f"if its base is not {base}, name that with --model"
        error.hint = other if error.hint is None else f"{error.hint}; {other}"
        raise
    low, high = summary.scaling
    rows = {
        "layout": summary.layout,
        "targets": "\n".join(summary.targets),
        "projections": str(summary.num_projections),
        "ranks": ", ".join(map(str, summary.ranks)),
        "scaling": f"{low:g}" if low == high else f"{low:g} to {high:g}",
        "dtype": ", ".join(summary.dtypes),
        "tensors": str(summary.num_tensors),
        "parameters": f"{summary.num_parameters:,}",
        "size": megabytes(summary.nbytes),
        f"a bank slot of rank {max_rank} (bfloat16)": megabytes(_slot_bytes(model)),
        "base": str(base),
    }
    _print_rows(console, f"adapter {folder}", rows)


def _print_model(console: Console, folder: Path, max_rank: int, max_adapters: int) -> None:
    config = read_config(folder)
    tensors = Checkpoint.open(folder, config).names()
    model = abstract_model(config, adapters=SlotConfig(1, max_rank))
    slot = _slot_bytes(model)
    rows = {
        "family": config.family,
        "layers": str(config.num_layers),
        "hidden size": str(config.hidden_size),
        "attention": _attention(config),
        "experts": _experts(config),
        "vocabulary": str(config.vocab_size),
        "parameters": f"{sum(math.prod(info.shape) for info in tensors.values()):,}",
        "dtypes": ", ".join(sorted({str(info.dtype) for info in tensors.values()})),
        "cache per token (bfloat16)": f"{_cache_bytes(model, config):,} bytes",
        f"a bank slot of rank {max_rank} (bfloat16)": megabytes(slot),
        f"a bank of {max_adapters} slots": megabytes(slot * max_adapters),
        "projections that adapters may target": str(len(projections(model))),
    }
    _print_rows(console, f"model {folder}", rows)


def _slot_bytes(model) -> int:
    """Bytes of a model's bank, built with one slot."""
    arrays = jax.tree.leaves([nnx.state(slots) for slots in iter_slots(model)])
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def _cache_bytes(model, config: ModelConfig) -> int:
    shapes = [shape for layer in model.layers for shape in layer.self_attn.cache_shapes(config)]
    return 2 * sum(map(math.prod, shapes))


def _attention(config: ModelConfig) -> str:
    if config.mla is None:
        return f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads"
    return f"latent ({config.mla.kv_lora_rank} + {config.mla.qk_rope_head_dim}), " + (
        f"{config.num_heads} heads"
    )


def _experts(config: ModelConfig) -> str:
    if config.moe is None:
        return "none"
    shared = f", shared width {config.moe.shared_size}" if config.moe.shared_size else ""
    return f"{config.moe.num_experts}, {config.moe.top_k} for each token{shared}"


def megabytes(size: int) -> str:
    """A size in MB, as tables show it."""
    return f"{size / 1e6:,.2f} MB"


def _print_rows(console: Console, title: str, rows: dict[str, str]) -> None:
    table = Table(title=escape(title), show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)
