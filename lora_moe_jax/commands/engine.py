"""What `generate` and `score` share: an engine with adapters, and texts to run under each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lora_moe_jax.commands.options import (
    MODEL_HELP,
    adapter_folders,
    add_adapter_option,
    add_dtype_option,
    add_mesh_option,
    check_tokenizer,
    dtype_of,
    model_folder,
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
    parser.add_argument("--max-rank", type=int, default=32)
    parser.add_argument("--max-length", type=int, help="most tokens of one request")
    add_mesh_option(parser)


def engine_and_requests(options: argparse.Namespace, texts: Sequence[str]):
    """The engine with its adapters, and every text once for each adapter to use.

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
        max_length=options.max_length,
        mesh=options.mesh,
        progress=True,
    )
    names = [None if name == BASE_NAME else name for name in used] * len(texts)
    return engine, [text for text in texts for _ in used], names
