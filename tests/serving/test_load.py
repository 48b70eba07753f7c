"""Much at once on the pocket model: nothing is lost, compiled or kept, and no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_moe_jax import Engine
from lora_moe_jax.pocket import BASE
from tests.serving.helpers import with_options
from tests.serving.load import LONGEST_PROMPT, MOST_TOKENS, Clock, Load, Memory, write_adapters

OPTIONS = {
    "dtype": "float32",
    "max_rank": 16,
    "max_length": LONGEST_PROMPT + MOST_TOKENS,
    "page_size": 8,
    "token_buckets": (32,),
    "max_logprobs": 0,
}
REQUESTS, ADAPTERS = 2000, 200


def run_load(load: Load, engine: Engine, requests: int) -> dict[str, object]:
    """Both halves of a run, the checks that need no other engine, and its figures."""
    before = engine.stats()
    with Clock() as clock:
        load.run(requests // 2)
        half = Memory.now()
        load.run(requests - requests // 2)
    end, after = Memory.now(), engine.stats()
    load.check_idle()
    load.check_asked()
    assert after.compilations == before.compilations
    assert (end.arrays, end.array_bytes) == (half.arrays, half.array_bytes)
    return {
        "requests": len(load.asked),
        "tokens": after.generated_tokens - before.generated_tokens,
        "steps": after.steps - before.steps,
        "loads into slots": after.adapter_loads - before.adapter_loads,
        "evictions": after.adapter_evictions - before.adapter_evictions,
        "prefix hit tokens": after.prefix_hit_tokens - before.prefix_hit_tokens,
        "preemptions": after.preemptions - before.preemptions,
        "aborted": sum(bool(o.completion and not o.whole) for o in load.asked),
        "closed": sum(one.closed for one in load.asked),
        **load.done,
        "seconds": round(clock.seconds, 1),
        "resident MB after one half": round(half.resident / 1e6, 1),
        "its growth in the other": round((end.resident - half.resident) / 1e6, 1),
    }


def check_figures(figures: dict[str, object]) -> None:
    """All that is to be tried was."""
    idle = [name for name, count in figures.items() if not count and "growth" not in name]
    assert not idle, idle


def test_a_little_load(tmp_path: Path, tight: Engine):
    """Compared with each request alone in the same engine, which then forgets what it has."""
    engine = with_options(tight)
    load = Load(engine, write_adapters(tmp_path, engine.bank.projections, 6), seed=1)
    check_figures(run_load(load, engine, 24))
    for info in engine.adapters():
        engine.unload_adapter(info.name)
    engine._runner.scheduler.prefix_cache = False
    load.check_bits(engine)


@pytest.mark.slow
def test_two_thousand_requests_over_two_hundred_adapters(tmp_path: Path, capsys):
    """Compared with each request alone, in an engine for one request and one adapter."""
    engine = Engine.from_pretrained(
        BASE, **OPTIONS, max_adapters=8, max_requests=8, cache_tokens=256
    )
    folders = write_adapters(tmp_path, engine.bank.projections, ADAPTERS)
    load = Load(engine, folders)
    alone = Engine.from_pretrained(
        BASE,
        **OPTIONS | {"token_buckets": (8, 48)},
        max_adapters=1,
        max_requests=1,
        prefix_cache=False,
    )
    figures = run_load(load, engine, REQUESTS)
    with capsys.disabled():
        print("\n" + "\n".join(f"{name:28}{value}" for name, value in figures.items()))
    check_figures(figures)
    assert figures["its growth in the other"] < 32
    load.check_bits(alone)
