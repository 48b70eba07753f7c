"""Adapters that go to their slots in parts while requests run: no bit of anyone's changes by it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lora_moe_jax import AdapterError, AsyncEngine, read_adapter
from lora_moe_jax.serving import engine as engine_module
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import bits, greedy, prompts

FAMILY = "qwen3_moe"
FOLDERS = GOLDEN / FAMILY / "adapters"


def served(engine, name):
    return [bits(out) for out in engine.generate(prompts([5, 9]), greedy(6), [name] * 2)]


@pytest.fixture
def loaded(engine):
    one = engine(FAMILY)
    one.load_adapter("attn", FOLDERS / "attn")
    one.load_adapter("experts", FOLDERS / "experts")
    assert not one._adapters.writing, "nobody ran"
    return one


def test_a_load_goes_on_between_the_steps_of_others(loaded, monkeypatch):
    monkeypatch.setattr("lora_moe_jax.serving.scheduler.MOST_PARTS", 1)
    expected = served(loaded, "experts")
    attn = bits(loaded.generate(prompts([7]), greedy(40), ["attn"])[0])
    loaded.unload_adapter("experts")
    steps = loaded.stats().steps
    with loaded.stream(prompts([7]), greedy(40), ["attn"]) as stream:
        next(stream)
        info = loaded.load_adapter("experts", FOLDERS / "experts")
        assert info.slot is not None and loaded._adapters.writing
        with loaded.stream(prompts([5, 9]), greedy(6), ["experts"] * 2) as late:
            ends = [delta.completion for delta in late if delta.completion is not None]
        completion = [delta.completion for delta in stream][-1]
    assert not loaded._adapters.writing
    assert [
        bits(end) for end in sorted(ends, key=lambda end: len(end.prompt_token_ids))
    ] == expected
    assert bits(completion) == attn
    parts = len(loaded.bank.projections)
    assert loaded.stats().steps - steps >= 6 + parts, "the late requests waited for every part"


def test_what_is_unloaded_half_written_leaves_nothing(loaded, monkeypatch):
    monkeypatch.setattr("lora_moe_jax.serving.scheduler.MOST_PARTS", 1)
    expected, loads = served(loaded, None), loaded.stats().adapter_loads
    loaded.unload_adapter("experts")
    with loaded.stream(prompts([7]), greedy(40), ["attn"]) as stream:
        next(stream)
        slot = loaded.load_adapter("experts", FOLDERS / "experts").slot
        next(stream)
        loaded.unload_adapter("experts")
        assert not loaded._adapters.writing and loaded.stats().free_adapter_slots == 7
    assert served(loaded, None) == expected and loaded.stats().adapter_loads == loads + 1
    assert loaded.load_adapter("rslora", FOLDERS / "rslora").slot == slot


def test_a_pin_while_others_run_is_there_when_a_request_comes(loaded):
    expected = served(loaded, "experts")
    loaded.unload_adapter("experts")
    with loaded.stream(prompts([7]), greedy(4), ["attn"]) as stream:
        next(stream)
        loaded.load_adapter("experts", FOLDERS / "experts")
        loaded.pin_adapter("experts")
    loaded.unpin_adapter("experts")
    assert served(loaded, "experts") == expected


def test_a_trainer_gets_slots_that_are_written(loaded):
    loaded.unload_adapter("experts")
    with loaded.stream(prompts([7]), greedy(4), ["attn"]) as stream:
        next(stream)
        info = loaded.load_adapter("experts", FOLDERS / "experts")
        assert loaded.adapter_slots(["experts"]) == [info.slot]
        assert not loaded._adapters.writing


def test_adapters_are_checked_and_copied_beside_the_engine(loaded, monkeypatch):
    """In a thread of its own; what fails there concerns nobody else."""
    where = []

    def check(adapter, projections):
        where.append(threading.current_thread().name)
        check_adapter(adapter, projections)

    check_adapter = engine_module.check_adapter
    monkeypatch.setattr(engine_module, "check_adapter", check)
    adapter = read_adapter(FOLDERS / "rslora", loaded.bank.projections, max_rank=16)

    async def use():
        async with AsyncEngine(loaded) as running:
            info = await running.load_adapter("r", adapter)
            with pytest.raises(AdapterError):
                await running.load_adapter("bad name", adapter)
            return info

    info = asyncio.run(use())
    assert info.version == 1 and len(where) == 1 and where[0] != "lora_moe_jax engine"
