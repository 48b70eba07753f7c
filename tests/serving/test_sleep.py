"""Giving the memory of cache and bank away between requests, and taking it back."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import pytest

from lora_moe_jax import AsyncEngine, Engine, RequestError
from lora_moe_jax.adapters import LoraPair, read_adapter
from lora_moe_jax.serving.sleep import EngineAsleepError, EngineBusyError
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import ADAPTERS, bits, greedy, load_golden, prompts

FAMILY = "deepseek_v3"
FOLDERS = GOLDEN / FAMILY / "adapters"
BATCH = prompts([40, 5, 33, 20])
NAMES = [None, *ADAPTERS]


@pytest.fixture
def one(engine) -> Engine:
    loaded = engine(FAMILY)
    load_golden(loaded, FAMILY)
    loaded._runner.scheduler.prefix_cache = True
    yield loaded
    loaded.wake()


def served(engine: Engine) -> list:
    return list(map(bits, engine.generate(BATCH, greedy(6), NAMES)))


def device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("level", [1, 2])
def test_after_waking_everything_is_as_before(one, level):
    one.pin_adapter("attn")
    expected, before, held = served(one), one.stats(), device_bytes()
    assert before.cached_pages > 0
    for _ in range(2):
        one.sleep(level)
        one.sleep(1)
        asleep = one.stats()
        assert (asleep.cached_pages, asleep.cache_bytes) == (0, 0)
        assert asleep.free_pages == asleep.total_pages
        freed = before.cache_bytes + (before.bank_bytes if level == 2 else 0)
        assert device_bytes() == held - freed
        assert asleep.bank_bytes == (0 if level == 2 else before.bank_bytes)
        for call in (one.generate, one.stream, one.score):
            with pytest.raises(EngineAsleepError, match="asleep") as caught:
                call([[1, 2]])
            assert "wake" in caught.value.hint
        one.wake()
        one.wake()
        assert device_bytes() == held
        pinned = {info.name: info for info in one.adapters()}["attn"]
        assert pinned.pinned and pinned.slot is not None
        hits = one.stats().prefix_hit_tokens
        assert served(one) == expected
        assert one.stats().prefix_hit_tokens == hits, "the cache was emptied"
    assert one.stats().compilations == before.compilations


def test_a_deep_sleep_keeps_what_came_from_the_device(one):
    adapter = read_adapter(FOLDERS / "experts", one.bank.projections)
    one.update_adapter(
        "updated",
        {
            name: LoraPair(*map(jnp.asarray, (p.a, p.b, p.scaling)), p.ranks)
            for name, p in adapter.pairs.items()
        },
    )
    expected = bits(one.generate(BATCH[:1], greedy(6), "updated")[0])
    assert expected == bits(one.generate(BATCH[:1], greedy(6), "experts")[0])
    compilations = one.stats().compilations
    one.sleep(1)
    one.sleep(2)
    for call in (
        lambda: one.load_adapter("new", FOLDERS / "attn"),
        lambda: one.update_adapter("updated", adapter),
        lambda: one.pin_adapter("updated"),
    ):
        with pytest.raises(EngineAsleepError, match="the bank is asleep"):
            call()
    one.unload_adapter("rslora")
    one.wake()
    assert bits(one.generate(BATCH[:1], greedy(6), "updated")[0]) == expected
    assert one.stats().compilations == compilations


def test_adapters_change_in_a_light_sleep(one):
    one.sleep()
    one.load_adapter("new", FOLDERS / "experts")
    one.wake()
    new, experts = one.generate(BATCH[:1] * 2, greedy(6), ["new", "experts"])
    assert bits(new) == bits(experts)


def test_sleeping_is_refused_while_requests_run(one):
    expected = bits(one.generate(BATCH[:1], greedy(9))[0])
    stream = one.stream(BATCH * 3, greedy(9))
    next(stream)
    with pytest.raises(EngineBusyError, match="unfinished") as caught:
        one.sleep()
    assert "abort=True" in caught.value.hint
    with pytest.raises(RequestError, match="level"):
        one.sleep(3, abort=True)
    assert one.stats().running == 8
    one.sleep(abort=True)
    reasons = [d.completion.finish_reason for d in stream if d.completion]
    assert reasons == ["abort"] * 12
    one.wake()
    assert bits(one.generate(BATCH[:1], greedy(9))[0]) == expected


def test_sleeping_from_asyncio(one):
    async def main():
        async with AsyncEngine(one) as running:
            deltas = await running.stream(BATCH, greedy(80))
            await anext(deltas)
            with pytest.raises(EngineBusyError):
                await running.sleep()
            scored = asyncio.create_task(running.score(prompts([120] * 9)))
            while not (await running.stats()).waiting:
                await asyncio.sleep(0)
            await running.sleep(2, abort=True)
            ends = [d.completion.finish_reason async for d in deltas if d.completion]
            assert ends == ["abort"] * 4
            with pytest.raises(RequestError, match="aborted"):
                await scored
            with pytest.raises(EngineAsleepError):
                await running.score([[1, 2]])
            await running.wake()
            adapter = read_adapter(FOLDERS / "attn", one.bank.projections)
            assert (await running.update_adapter("attn", adapter)).layout == "device"
            return len((await running.score([[1, 2, 3]], ["attn"]))[0].logprobs)

    assert asyncio.run(main()) == 2
