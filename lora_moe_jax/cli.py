"""The command line: demo, generate, score, serve, train, rl, inspect, bench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lora_moe_jax.bench.kernels import SECTIONS, run_bench, show
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.named import NAMED_CONFIGS, named_config
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import ConfigError, LoraMoeError, RequestError
from lora_moe_jax.pocket import ADAPTERS, BASE
from pallas_kernels.shapes import EXPERT_SHAPES

DESCRIPTION = "Train and serve many LoRA adapters at once over one Mixture-of-Experts base model."
MODEL_HELP = "Hugging Face model folder, or 'pocket' for the model that comes with the package"
DEFAULT_SLOTS = 8
ADAPTER_HELP = "an adapter to load; may be repeated. For 'pocket', a bare name of its adapters"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns the exit status (2 for bad input)."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except LoraMoeError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lora-moe-jax", description=DESCRIPTION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="serve the pocket model and its adapters together")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="generate text with adapters")
    _add_model_options(generate)
    generate.add_argument("--prompt", action="append", required=True, help="may be repeated")
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--stop", action="append", default=[], help="may be repeated")
    generate.set_defaults(run=_generate)

    score = commands.add_parser("score", help="logprobs of given texts under adapters")
    _add_model_options(score)
    score.add_argument("--text", action="append", required=True, help="may be repeated")
    score.add_argument("--tokens", action="store_true", help="show every token")
    score.set_defaults(run=_score)

    serve = commands.add_parser("serve", help="an HTTP server with OpenAI's interface")
    serve.add_argument("--model", default="pocket", help=MODEL_HELP)
    _add_adapter_option(serve)
    serve.add_argument(
        "--adapter-root",
        type=Path,
        metavar="FOLDER",
        help="let clients load adapters from this folder; without it they cannot load any",
    )
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    serve.add_argument("--max-adapters", type=int, help="slots (default: 8, or as many as given)")
    serve.add_argument("--max-rank", type=int, default=32)
    serve.add_argument("--max-requests", type=int, default=8, help="requests that run at once")
    serve.add_argument("--max-length", type=int, help="most tokens of one request")
    serve.add_argument("--served-name", help="of the base model; default: its folder's name")
    serve.add_argument("--max-waiting", type=int, default=256, help="requests that may wait")
    serve.add_argument("--api-key", help="what clients must send")
    serve.set_defaults(run=_serve)

    train = commands.add_parser("train", help="train an adapter on a JSONL file")
    _add_train_options(train)
    train.set_defaults(run=_train)

    rl = commands.add_parser("rl", help="train two adapters of the pocket model by GRPO, at once")
    rl.add_argument("--steps", type=_positive, default=30, help="(default 30)")
    rl.add_argument("--seed", type=_natural, default=0)
    rl.set_defaults(run=_rl)

    inspect = commands.add_parser("inspect", help="what is in an adapter or checkpoint folder")
    inspect.add_argument("folder", type=Path)
    inspect.add_argument("--model", default="pocket", help="the adapter's base: " + MODEL_HELP)
    inspect.add_argument("--max-rank", type=int, default=32, help="rank of a slot (default 32)")
    inspect.add_argument("--max-adapters", type=int, default=8, help="slots (default 8)")
    inspect.set_defaults(run=_inspect)

    bench = commands.add_parser("bench", help="measure")
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    kernels = benches.add_parser("kernels", help="the kernels against their roofline and others")
    kernels.add_argument(
        "--only",
        action="append",
        choices=tuple(SECTIONS),
        help="a section to run; may be repeated. Default: slots on a CPU, all others on a GPU",
    )
    kernels.add_argument(
        "--shape",
        action="append",
        choices=tuple(EXPERT_SHAPES),
        help="a model's experts; may be repeated. Default: all",
    )
    kernels.add_argument("--json", type=Path, help="also write the numbers to this file")
    kernels.set_defaults(run=_bench_kernels)
    serving = benches.add_parser("serving", help="prefill and decode of a whole model")
    _add_bench_serving_options(serving)
    serving.set_defaults(run=_bench_serving)
    training = benches.add_parser("training", help="training adapters of a whole model")
    _add_bench_training_options(training)
    training.set_defaults(run=_bench_training)
    mismatch = benches.add_parser(
        "mismatch",
        help="logprobs and experts of the sampler and of the trainer",
        description="Samples, and compares each token's logprob, and the experts that every router "
        "chose for it, with the trainer's. Weights, a cache for all requests and the adapters in "
        "training have to fit into the memory of one device; JAX takes 0.75 of a GPU's, more with "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment.",
    )
    _add_bench_mismatch_options(mismatch)
    mismatch.set_defaults(run=_bench_mismatch)
    shown = benches.add_parser("show", help="the tables of a file that --json wrote")
    shown.add_argument("file", type=Path)
    shown.set_defaults(run=_bench_show)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="pocket", help=MODEL_HELP)
    _add_adapter_option(parser)
    parser.add_argument(
        "--use",
        action="append",
        metavar="NAME",
        help="adapters to run each text with, 'base' for none; default: all that are loaded",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--max-rank", type=int, default=32)
    parser.add_argument("--max-length", type=int, help="most tokens of one request")


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="pocket", help=MODEL_HELP)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSONL; a line is {"prompt": …, "completion": …}, {"messages": […]} or {"text": …}',
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for the adapter; is created"
    )
    parser.add_argument("--rank", type=_positive, default=16, help="(default 16)")
    parser.add_argument("--alpha", type=float, default=32.0, help="(default 32)")
    parser.add_argument(
        "--target-modules",
        action="append",
        metavar="NAME",
        help="such as o_proj or experts.up_proj; may be repeated. Default: all linear modules",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(default 0.001)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=_positive, help="default: as many as the epochs have")
    length.add_argument("--epochs", type=_positive, help="(default 1)")
    parser.add_argument(
        "--batch-tokens", type=_positive, default=2048, help="most of a step (default 2048)"
    )
    parser.add_argument("--seed", type=_natural, default=0, help="of order and first values")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--max-length", type=_positive, help="most tokens of one example")


def _add_bench_model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="qwen3-30b-a3b",
        help=f"{', '.join(NAMED_CONFIGS)}, or a folder or file with a configuration; weights are "
        "random (default qwen3-30b-a3b)",
    )


def _add_bench_serving_options(parser: argparse.ArgumentParser) -> None:
    _add_bench_model_option(parser)
    parser.add_argument(
        "--decode",
        type=_positive,
        action="append",
        metavar="REQUESTS",
        help="requests that decode together; may be repeated (default 1, 32, 64)",
    )
    parser.add_argument(
        "--context", type=_positive, default=1024, help="their prompts (default 1024)"
    )
    parser.add_argument(
        "--prefill", type=_positive, default=4096, help="tokens of one prompt (default 4096)"
    )
    parser.add_argument(
        "--adapters",
        type=_positive,
        action="append",
        help="adapters that requests use in turns; may be repeated (default 1, 8)",
    )
    parser.add_argument("--rank", type=_positive, default=16)
    parser.add_argument("--shared-outer", action="store_true", help="shared-outer adapters")
    parser.add_argument(
        "--output", type=_positive, default=64, help="tokens to generate (default 64)"
    )
    parser.add_argument(
        "--decode-steps",
        type=_positive,
        default=1,
        help="decode steps that the device takes by itself where it can (default 1)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")


def _add_bench_training_options(parser: argparse.ArgumentParser) -> None:
    _add_bench_model_option(parser)
    parser.add_argument("--layers", type=_positive, help="the model's first ones alone")
    parser.add_argument(
        "--adapters",
        type=_positive,
        action="append",
        help="adapters in a batch; may be repeated (default 1, and 1 on attention alone)",
    )
    parser.add_argument(
        "--sequences", type=_positive, help="of a batch (default 4, at least one an adapter)"
    )
    parser.add_argument("--length", type=_positive, default=4096, help="of each (default 4096)")
    parser.add_argument("--rank", type=_positive, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")


def _add_bench_mismatch_options(parser: argparse.ArgumentParser) -> None:
    _add_bench_model_option(parser)
    parser.add_argument("--layers", type=_positive, help="the model's first ones alone")
    parser.add_argument(
        "--tokens", type=_positive, default=100_000, help="to sample (default 100000)"
    )
    parser.add_argument("--requests", type=_positive, default=64, help="at a time (default 64)")
    parser.add_argument("--prompt", type=_positive, default=512, help="the longest (default 512)")
    parser.add_argument("--output", type=_positive, default=256, help="of each (default 256)")
    parser.add_argument(
        "--adapters", type=_positive, default=1, help="in turns, all in training (default 1)"
    )
    parser.add_argument("--rank", type=_positive, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, found {text}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, found {text}")
    return int(text)


def _bench_serving(options: argparse.Namespace) -> None:
    from lora_moe_jax.bench.serving import run_serving, standard_loads

    run_serving(
        _wide_console(),
        options.model,
        _bench_config(options.model),
        standard_loads(
            options.decode or (1, 32, 64),
            options.context,
            options.prefill,
            options.adapters or (1, 8),
        ),
        rank=options.rank,
        shared_outer=options.shared_outer,
        dtype=options.dtype,
        output=options.output,
        decode_steps=options.decode_steps,
        json_file=options.json,
    )


def _bench_training(options: argparse.Namespace) -> None:
    from lora_moe_jax.bench.trainer import run_training, standard_loads

    run_training(
        _wide_console(),
        options.model,
        _bench_config(options.model, options.layers),
        standard_loads(options.adapters, options.sequences, options.length),
        rank=options.rank,
        dtype=options.dtype,
        json_file=options.json,
    )


def _bench_mismatch(options: argparse.Namespace) -> None:
    from lora_moe_jax.bench.mismatch import Load, run_mismatch

    sizes = options.tokens, options.requests, options.prompt, options.output, options.adapters
    run_mismatch(
        _wide_console(),
        options.model,
        _bench_config(options.model, options.layers),
        Load(*sizes),
        rank=options.rank,
        dtype=options.dtype,
        json_file=options.json,
    )


def _bench_config(model: str, layers: int | None = None) -> ModelConfig:
    config = named_config(model) if model in NAMED_CONFIGS else read_config(model)
    return config if layers is None else config.first_layers(layers)


def _add_adapter_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER", help=ADAPTER_HELP
    )


def _demo(options: argparse.Namespace) -> None:
    from lora_moe_jax.demo import run_demo

    run_demo(Console())


def _generate(options: argparse.Namespace) -> None:
    from lora_moe_jax.serving.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=tuple(options.stop),
    )
    engine, prompts, names = _engine_and_requests(options, options.prompt)
    console = Console()
    outputs = engine.generate(prompts, params, names)
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        console.rule(f"{name or 'base'} · {output.finish_reason}")
        console.print(prompt, style="dim", end="", markup=False, highlight=False)
        console.print(output.text, markup=False, highlight=False)


def _score(options: argparse.Namespace) -> None:
    engine, texts, names = _engine_and_requests(options, options.text)
    console = Console()
    table = Table("text", "adapter", "tokens", "sum logprob", "mean logprob")
    scores = engine.score(texts, names)
    for text, name, score in zip(texts, names, scores, strict=True):
        total, count = float(score.logprobs.sum()), len(score.logprobs)
        mean = f"{total / count:.4f}" if count else "-"
        table.add_row(text[:40], name or "base", str(count), f"{total:.4f}", mean)
    console.print(table)
    if options.tokens:
        for text, name, score in zip(texts, names, scores, strict=True):
            console.rule(name or "base")
            ids = engine.codec.encode(text)
            for token, logprob in zip(ids[1:], score.logprobs, strict=True):
                console.print(f"{logprob:10.4f}  {engine.codec.decode([token])!r}", markup=False)


def _engine_and_requests(options: argparse.Namespace, texts: Sequence[str]):
    """The engine with its adapters, and every text once for each adapter to use."""
    from lora_moe_jax.serving.engine import Engine

    adapters = _adapter_folders(options)
    used = options.use or list(adapters) or ["base"]
    for name in used:
        if name != "base" and name not in adapters:
            raise RequestError(
                "--use names an adapter that is not loaded",
                key="--use",
                expected=f"base, or one of {sorted(adapters)}",
                found=name,
                hint=f"add --adapter {name}=FOLDER",
            )
    engine = Engine.from_pretrained(
        _model_folder(options.model),
        dtype=options.dtype,
        max_adapters=len(adapters),
        max_rank=options.max_rank,
        max_length=options.max_length,
        progress=True,
    )
    for name, folder in adapters.items():
        engine.load_adapter(name, folder)
    names = [None if name == "base" else name for name in used] * len(texts)
    return engine, [text for text in texts for _ in used], names


def _serve(options: argparse.Namespace) -> None:
    try:
        from lora_moe_jax.server.names import ModelNames
        from lora_moe_jax.server.run import check_adapter_root, open_socket, run_server
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

    adapters = _adapter_folders(options)
    folder = _model_folder(options.model)
    pocket = options.model == "pocket"
    names = ModelNames(options.served_name or ("pocket" if pocket else folder.resolve().name))
    for name in adapters:
        names.check(name)
    check_adapter_root(options.adapter_root)
    with open_socket(options.host, options.port) as listener:
        slots = options.max_adapters
        engine = Engine.from_pretrained(
            folder,
            dtype=options.dtype,
            max_adapters=max(DEFAULT_SLOTS, len(adapters)) if slots is None else slots,
            max_rank=options.max_rank,
            max_requests=options.max_requests,
            max_length=options.max_length,
            progress=True,
        )
        for name, adapter in adapters.items():
            engine.load_adapter(name, adapter)
        run_server(
            engine,
            listener,
            names,
            max_waiting=options.max_waiting,
            adapter_root=options.adapter_root,
            api_key=options.api_key,
        )


def _train(options: argparse.Namespace) -> None:
    from lora_moe_jax.training import LoraConfig, SftConfig
    from lora_moe_jax.training.sft_command import train_adapter

    lora = LoraConfig(
        rank=options.rank,
        alpha=options.alpha,
        target_modules=options.target_modules or "all-linear",
        seed=options.seed,
    )
    config = SftConfig(
        steps=options.steps,
        epochs=options.epochs or 1,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
    )
    train_adapter(
        Console(),
        _model_folder(options.model),
        options.data,
        options.out,
        lora,
        config,
        dtype=options.dtype,
        max_length=options.max_length,
        seed=options.seed,
    )


def _rl(options: argparse.Namespace) -> None:
    from lora_moe_jax.training.rl_demo import run_rl

    run_rl(_wide_console(), options.steps, options.seed)


def _adapter_folders(options: argparse.Namespace) -> dict[str, Path]:
    return dict(_adapter_folder(item, options.model) for item in options.adapter)


def _adapter_folder(item: str, model: str) -> tuple[str, Path]:
    name, _, folder = item.partition("=")
    if folder:
        return name, Path(folder)
    if model == "pocket" and name in ADAPTERS:
        return name, ADAPTERS[name]
    raise RequestError(
        "--adapter needs a name and a folder",
        key="--adapter",
        expected="NAME=FOLDER" + (f", or one of {sorted(ADAPTERS)}" if model == "pocket" else ""),
        found=item,
    )


def _model_folder(model: str) -> Path:
    return BASE if model == "pocket" else Path(model)


def _inspect(options: argparse.Namespace) -> None:
    from lora_moe_jax.inspect import inspect_folder

    base = _model_folder(options.model)
    inspect_folder(Console(), options.folder, base, options.max_rank, options.max_adapters)


def _bench_kernels(options: argparse.Namespace) -> None:
    run_bench(_wide_console(), options.only or (), options.shape or (), options.json)


def _bench_show(options: argparse.Namespace) -> None:
    show(_wide_console(), options.file)


def _wide_console() -> Console:
    """Tables have a dozen columns: room for them where no terminal sets the width."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


if __name__ == "__main__":
    sys.exit(main())
