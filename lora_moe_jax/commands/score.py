"""`lora-moe-jax score`: the logprobs of texts under each adapter."""

from __future__ import annotations

import argparse

from rich.table import Table
from rich.text import Text

from lora_moe_jax.commands.console import plain_console
from lora_moe_jax.commands.engine import add_engine_options, engine_and_requests


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("score", help="logprobs of given texts under adapters")
    add_engine_options(parser)
    parser.add_argument("--text", action="append", required=True, help="may be repeated")
    parser.add_argument("--tokens", action="store_true", help="show every token")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    engine, texts, names = engine_and_requests(options, options.text)
    console = plain_console()
    table = Table("text", "adapter", "tokens", "sum logprob", "mean logprob")
    scores = engine.score(texts, names)
    for text, name, score in zip(texts, names, scores, strict=True):
        total, count = float(score.logprobs.sum()), len(score.logprobs)
        mean = f"{total / count:.4f}" if count else "-"
        table.add_row(Text(text[:40]), name or "base", str(count), f"{total:.4f}", mean)
    console.print(table)
    if options.tokens:
        for text, name, score in zip(texts, names, scores, strict=True):
            console.rule(name or "base")
            ids = engine.codec.encode(text)
            for token, logprob in zip(ids[1:], score.logprobs, strict=True):
                console.out(f"{logprob:10.4f}  {engine.codec.decode([token])!r}", highlight=False)
