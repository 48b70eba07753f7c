"""What `bench mismatch` writes down of one sampler, and its table."""

from __future__ import annotations

import dataclasses

from rich.table import Table


@dataclasses.dataclass(frozen=True)
class MismatchRow:
    """The logprobs of tokens under a sampler less those under the trainer, and their experts.

    Attributes:
      sampler: "generate", as tokens were made, or "score", of whole sequences.
      tokens: that were compared. cached: of the prompts, found in the prefix cache before them.
      mean, largest: of the absolute differences.
      differing: the share of tokens whose two logprobs are not equal.
      outside: the share of tokens whose two probabilities have a ratio outside of [0.9, 1.1].
      rerouted: the share of pairs of one of these tokens and a layer with a router in which the
        router chose other experts, or the same in another order, for the token before it, from
        which it is predicted; None without routers.
    """

    model: str
    layers: int
    adapters: int
    rank: int
    sampler: str
    requests: int
    tokens: int
    cached: int
    mean: float
    largest: float
    differing: float
    outside: float
    rerouted: float | None


def table(rows: list[MismatchRow]) -> Table:
    shown = Table(
        "model",
        "adapters",
        "sampler",
        "tokens",
        "of prompts cached",
        "mean |difference|",
        "largest",
        "differing",
        "ratio outside 0.9 to 1.1",
        "other experts",
        "",
        title="Logprobs and experts of the sampler against the trainer's",
    )
    for row in rows:
        shown.add_row(
            f"{row.model}, {row.layers} layers",
            f"{row.adapters}, r {row.rank}",
            f"{row.sampler}, {row.requests} at a time",
            str(row.tokens),
            str(row.cached),
            f"{row.mean:g}",
            f"{row.largest:g}",
            f"{row.differing:.2%}",
            f"{row.outside:.2%}",
            "–" if row.rerouted is None else f"{row.rerouted:.4%}",
            "[red]MISS[/]" if row.largest or row.rerouted else "[green]equal bits[/]",
        )
    return shown
