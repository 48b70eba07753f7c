"""What `generate` and `score` share: an engine with adapters, and texts to run under each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lora_moe_jax.commands.options import (
    MAX_RANK_HELP,
    MODEL_HELP,
    adapter_folders,
    add_adapter_option,
    add_dtype_option,
    add_mesh_option,
    check_tokenizer,
    dtype_of,
    model_folder,
    positive,
)
from lora_moe_jax.errors import RequestError

BASE_NAME = "base"  # in --use, for no adapter


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="pocket", help=MODEL_HELP)
    add_adapter_option(parser)
    parser.add_argument(
        "--use",
        action="append",
        metavar="NAME",
        help="adapters to run each text with, 'base' for none; default: all that are loaded",
    )
    add_dtype_option(parser)
    parser.add_argument("--max-rank", type=int, default=32, help=MAX_RANK_HELP)
    parser.add_argument(
        "--max-length",
        type=positive,
        help="most tokens of one text, prompt and output together; default: what they need",
    )
    add_mesh_option(parser)


def engine_and_requests(options: argparse.Namespace, texts: Sequence[str], max_tokens: int = 0):
    """The engine with its adapters, and every text once for each adapter to use.

    Args:
      max_tokens: that each text is to be continued with, at most.

    Returns:
      The engine; texts; and for each the name of its adapter, or None.

    Raises:
      AdapterError, CheckpointError, ConfigError, RequestError: what is wrong with the options.
    """
    from lora_moe_jax.serving.engine import Engine

    adapters = adapter_folders(options)
    if BASE_NAME in adapters:
        raise RequestError(
            "this name stands for the model without an adapter",
            key="--adapter",
            expected=f"another name than {BASE_NAME!r}",
            found=f"{BASE_NAME}={adapters[BASE_NAME]}",
        )
    used = options.use or list(adapters) or [BASE_NAME]
    for name in used:
        if name != BASE_NAME and name not in adapters:
            raise RequestError(
                "--use names an adapter that is not loaded",
                key="--use",
                expected=BASE_NAME + (f", or one of {sorted(adapters)}" if adapters else ""),
                found=name,
                hint=f"add --adapter {name}=FOLDER",
            )
    folder = model_folder(options.model)
    if folder.is_dir():  # else the engine says what is wrong with it
        check_tokenizer(folder)
    engine = Engine.from_pretrained(
        folder,
        adapters=adapters,
        dtype=dtype_of(options),
        max_adapters=len(adapters),
        max_rank=options.max_rank,
        max_length=_max_length(folder, options.max_length, texts, max_tokens),
        mesh=options.mesh,
        progress=True,
    )
    names = [None if name == BASE_NAME else name for name in used] * len(texts)
    return engine, [text for text in texts for _ in used], names


def _max_length(folder: Path, given: int | None, texts: Sequence[str], max_tokens: int) -> int:
    """Of the engine: what was given, or room for every text, which is looked at before weights.

    Raises:
      RequestError: a text and its continuation are longer than that, or than the model can be.
    """
    from lora_moe_jax.config.reader import read_config
    from lora_moe_jax.serving.options import DEFAULT_MAX_LENGTH
    from lora_moe_jax.serving.text import TextCodec

    most = read_config(folder).max_position if given is None else given
    codec = TextCodec.from_folder(folder)
    longest = max(len(codec.encode(text)) for text in texts)
    if longest + max_tokens > most:
        whose = "the model" if given is None else "--max-length"
        raise RequestError(
            "a text is too long",
            key="--max-tokens" if max_tokens else "--text",
            expected=f"at most {most} tokens, prompt and output together, as {whose} says",
            found=f"{longest} tokens" + (f" and {max_tokens} more" if max_tokens else ""),
        )
    return given or max(longest + max_tokens, min(DEFAULT_MAX_LENGTH, most))
