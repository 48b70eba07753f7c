"""`lora-moe-jax generate`: prompts, each completed under each adapter."""

from __future__ import annotations

import argparse

from rich.console import Console

from lora_moe_jax.commands.engine import add_engine_options, engine_and_requests


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("generate", help="generate text with adapters")
    add_engine_options(parser)
    parser.add_argument("--prompt", action="append", required=True, help="may be repeated")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="may be repeated")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
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
    engine, prompts, names = engine_and_requests(options, options.prompt)
    console = Console()
    outputs = engine.generate(prompts, params, names)
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        console.rule(f"{name or 'base'} · {output.finish_reason}")
        console.print(prompt, style="dim", end="", markup=False, highlight=False)
        console.print(output.text, markup=False, highlight=False)
