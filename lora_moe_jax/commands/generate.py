"""`lora-moe-jax generate`: prompts, each completed under each adapter."""

from __future__ import annotations

import argparse

from rich.segment import Segment, Segments
from rich.style import Style

from lora_moe_jax.commands.console import plain_console
from lora_moe_jax.commands.engine import add_engine_options, engine_and_requests


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("generate", help="generate text with adapters")
    add_engine_options(parser)
    parser.add_argument("--prompt", action="append", required=True, help="may be repeated")
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="most tokens of an answer (default 64)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default: the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from so many of the likeliest; 0: from all"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="from the likeliest that have this share together"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="from those with this share of the likeliest's"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default 0)")
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends an answer; may be repeated"
    )
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
    engine, prompts, names = engine_and_requests(options, options.prompt, options.max_tokens)
    console = plain_console()
    outputs = engine.generate(prompts, params, names)
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        console.rule(f"{name or 'base'} · {output.finish_reason}")
        # As they are: no tab becomes spaces, no line is folded.
        texts = Segment(prompt, Style(dim=True)), Segment(output.text), Segment.line()
        console.print(Segments(texts), crop=False)
