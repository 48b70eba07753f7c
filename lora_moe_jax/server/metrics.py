"""/metrics: the engine's counters and the answers given, in Prometheus's text format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from lora_moe_jax.serving.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "lora_moe_jax_"
# The others go up and down.
COUNTERS = (
    "compilations",
    "steps",
    "prompt_tokens",
    "prefix_hit_tokens",
    "generated_tokens",
    "adapter_loads",
    "adapter_evictions",
    "preemptions",
)


def exposition(stats: EngineStats, responses: Mapping[int, int]) -> str:
    """All metrics; `responses` counts HTTP responses by status."""
    samples = {f'{{status="{status}"}}': count for status, count in sorted(responses.items())}
    lines = list(_metric("http_responses_total", "counter", "HTTP responses", samples))
    for field in dataclasses.fields(stats):
        kind = "counter" if field.name in COUNTERS else "gauge"
        name = f"{field.name}_total" if kind == "counter" else field.name
        help_text = f"{field.name.replace('_', ' ')} (EngineStats.{field.name})"
        lines += _metric(name, kind, help_text, {"": getattr(stats, field.name)})
    return "".join(f"{line}\n" for line in lines)


def _metric(
    name: str, kind: str, help_text: str, samples: Mapping[str, int | float]
) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {help_text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
    for labels, value in samples.items():
        yield f"{PREFIX}{name}{labels} {value}"
