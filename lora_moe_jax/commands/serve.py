"""`lora-moe-jax serve`: an HTTP server with OpenAI's interface."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.commands.options import (
    MODEL_HELP,
    adapter_folders,
    add_adapter_option,
    add_dtype_option,
    add_mesh_option,
    check_tokenizer,
    dtype_of,
    model_folder,
    ranks,
)
from lora_moe_jax.errors import ConfigError

DEFAULT_SLOTS = 8


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("serve", help="an HTTP server with OpenAI's interface")
    parser.add_argument("--model", default="pocket", help=MODEL_HELP)
    add_adapter_option(parser)
    parser.add_argument(
        "--adapter-root",
        type=Path,
        metavar="FOLDER",
        help="let clients load adapters from this folder; without it they cannot load any",
    )
    parser.add_argument(
        "--adapter-disk",
        type=Path,
        metavar="FOLDER",
        help="keep adapters that have no slot in files in this folder, not in memory",
    )
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: this machine)")
    parser.add_argument("--port", type=int, default=8000, help="(default 8000)")
    add_dtype_option(parser)
    parser.add_argument("--max-adapters", type=int, help="slots (default: 8, or as many as given)")
    parser.add_argument(
        "--max-rank",
        type=ranks,
        default=32,
        metavar="RANK[:SLOTS,...]",
        help="the largest rank of an adapter (default 32), or 16:6,64:2 for slots of two ranks",
    )
    parser.add_argument(
        "--max-requests", type=int, default=8, help="requests that run at once (default 8)"
    )
    parser.add_argument(
        "--max-length", type=int, help="most tokens of one request (default 1024, or the model's)"
    )
    parser.add_argument(
        "--cache-tokens",
        type=int,
        help="of all requests together (default: of as many as run, each as long as any)",
    )
    parser.add_argument(
        "--decode-steps",
        type=int,
        default=1,
        help="tokens of each request that the device makes without the host (default 1)",
    )
    add_mesh_option(parser)
    parser.add_argument("--served-name", help="of the base model; default: its folder's name")
    parser.add_argument(
        "--max-waiting", type=int, default=256, help="requests that may wait (default 256)"
    )
    parser.add_argument("--api-key", help="what clients must send")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    try:
        from lora_moe_jax.server.names import ModelNames
        from lora_moe_jax.server.run import (
            check_adapter_root,
            check_api_key,
            open_socket,
            run_server,
        )
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            "the server needs a package that is not installed",
            key=missing,
            hint='pip install "lora-moe-jax[serve]"',
        ) from error
    from lora_moe_jax.serving.engine import Engine
    from lora_moe_jax.serving.queue_limit import check_limit

    adapters = adapter_folders(options)
    folder = model_folder(options.model)
    pocket = options.model == "pocket"
    names = ModelNames(options.served_name or ("pocket" if pocket else folder.resolve().name))
    for name in adapters:
        names.check(name)
    check_adapter_root(options.adapter_root)
    check_api_key(options.api_key)
    check_limit(options.max_waiting)
    slots = _slots(options, len(adapters))
    if folder.is_dir():  # else the engine says what is wrong with it
        check_tokenizer(folder)
    with open_socket(options.host, options.port) as listener:
        engine = Engine.from_pretrained(
            folder,
            adapters=adapters,
            dtype=dtype_of(options),
            max_adapters=slots,
            max_rank=options.max_rank,
            max_requests=options.max_requests,
            max_length=options.max_length,
            cache_tokens=options.cache_tokens,
            decode_steps=options.decode_steps,
            mesh=options.mesh,
            adapter_disk=options.adapter_disk,
            progress=True,
        )
        run_server(
            engine,
            listener,
            names,
            max_waiting=options.max_waiting,
            adapter_root=options.adapter_root,
            api_key=options.api_key,
        )


def _slots(options: argparse.Namespace, adapters: int) -> int:
    if options.max_adapters is not None:
        if adapters and options.max_adapters < 1:
            raise ConfigError(
                "there is no slot for an adapter",
                key="--max-adapters",
                expected="at least 1 with --adapter",
                found=options.max_adapters,
            )
        return options.max_adapters
    if isinstance(options.max_rank, dict):
        return sum(options.max_rank.values())
    return max(DEFAULT_SLOTS, adapters)
