"""New versions of an adapter from arrays on the device, as a training loop makes them."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax import AdapterError, Engine, RequestError, read_adapter
from lora_moe_jax.adapters import Adapter, LoraPair
from tests.adapters.tables import GOLDEN, golden_adapters
from tests.serving.helpers import bits, constant_adapter, greedy, load_golden, probe, prompts

FAMILY = "deepseek_v3"


@pytest.fixture
def one(engine) -> Engine:
    return engine(FAMILY)


def params_of(adapter: Adapter, times: float = 1.0) -> dict[str, LoraPair]:
    """What a trainer has: arrays of its own on the device."""
    return {
        name: LoraPair(
            jnp.asarray(pair.a), jnp.asarray(pair.b) * times, jnp.asarray(pair.scaling), pair.ranks
        )
        for name, pair in adapter.pairs.items()
    }


def golden(engine: Engine, family: str, name: str) -> Adapter:
    return read_adapter(GOLDEN / family / "adapters" / name, engine.bank.projections)


def slot_bits(engine: Engine, slot: int) -> list[bytes]:
    return [np.asarray(x[slot]).tobytes() for x in jax.tree.leaves(engine.bank.arrays)]


@pytest.mark.parametrize("family", [FAMILY, pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_updating_equals_loading(engine, family):
    one = engine(family)
    for name in golden_adapters(family):
        adapter = golden(one, family, name)
        loaded = one.load_adapter("loaded", adapter)
        updated = one.update_adapter("updated", params_of(adapter))
        assert slot_bits(one, loaded.slot) == slot_bits(one, updated.slot), name
        assert (updated.rank, updated.targets) == (loaded.rank, loaded.targets)
        assert (updated.layout, updated.nbytes) == ("device", 0)
        assert probe(one, "loaded") == probe(one, "updated")
        held = jax.tree.map(lambda x, slot=loaded.slot: x[slot], one.bank.arrays)
        whole = one.update_adapter("updated", held)
        assert whole.version == updated.version + 1
        assert slot_bits(one, whole.slot) == slot_bits(one, loaded.slot)


def test_two_hundred_updates_leave_nothing_and_compile_nothing(one):
    one._runner.scheduler.prefix_cache = True
    adapter = golden(one, FAMILY, "experts")
    load_golden(one, FAMILY, ["attn"])
    one.update_adapter("policy", params_of(adapter))
    one.generate(prompts([20]), greedy(2), "policy")
    gc.collect()

    def held() -> tuple[int, int]:
        arrays = jax.live_arrays()
        return len(arrays), sum(array.nbytes for array in arrays)

    pairs = params_of(adapter)
    before, compilations, start = held(), one.stats().compilations, one.stats()
    for _ in range(200):
        info = one.update_adapter("policy", pairs)
    one.generate(prompts([20]), greedy(2), "policy")
    gc.collect()
    assert held() == before
    after = one.stats()
    assert after.compilations == compilations
    assert info.version == 201 and after.adapter_loads == start.adapter_loads + 200
    assert after.adapter_host_bytes == start.adapter_host_bytes
    assert after.adapter_evictions == start.adapter_evictions


def test_the_trainers_arrays_stay_its_own(one):
    adapter = golden(one, FAMILY, "experts")
    pairs = params_of(adapter)
    one.update_adapter("policy", pairs)
    expected = probe(one, "policy")
    for pair in pairs.values():
        assert np.isfinite(pair.a).all()  # not donated
        for array in (pair.a, pair.b, pair.scaling):
            array.delete()
    assert probe(one, "policy") == expected
    with pytest.raises(AdapterError, match="do not fit"):
        one.update_adapter("policy", pairs)
    assert probe(one, "policy") == expected


def test_the_prefix_cache_does_not_know_the_new_version(one):
    """A new version finds no page of the one before; the old way in, past the pool, is gone."""
    one._runner.scheduler.prefix_cache = True
    adapter, batch = golden(one, FAMILY, "experts"), prompts([50])
    fresh = []
    for times in (1.0, 3.0):
        one._runner.scheduler.prefix_cache = False
        one.load_adapter("fresh", Adapter(host(params_of(adapter, times)), "x", adapter.config))
        fresh.append(bits(one.generate(batch, greedy(5), "fresh")[0]))
    assert fresh[0] != fresh[1]
    one._runner.scheduler.prefix_cache = True
    for turn in range(4):
        one.update_adapter("policy", params_of(adapter, [1.0, 3.0][turn % 2]))
        hits = one.stats().prefix_hit_tokens
        assert bits(one.generate(batch, greedy(5), "policy")[0]) == fresh[turn % 2]
        assert one.stats().prefix_hit_tokens == hits
        assert bits(one.generate(batch, greedy(5), "policy")[0]) == fresh[turn % 2]
        assert one.stats().prefix_hit_tokens > hits
    assert not hasattr(one.bank, "write")


def host(pairs: dict[str, LoraPair]) -> dict[str, LoraPair]:
    return {n: LoraPair(*map(np.array, (p.a, p.b, p.scaling, p.ranks))) for n, p in pairs.items()}


def test_requests_end_with_the_version_that_they_began_with(one):
    adapter, batch = golden(one, FAMILY, "experts"), prompts([9, 14])
    one.update_adapter("policy", params_of(adapter))
    old = list(map(bits, one.generate(batch, greedy(12), "policy")))
    stream = one.stream(batch, greedy(12), "policy")
    seen = [next(stream) for _ in range(5)]
    info = one.update_adapter("policy", params_of(adapter, 3.0))
    during = one.generate(batch, greedy(12), "policy")
    seen += stream
    ends = {d.index: d.completion for d in seen if d.completion}
    assert [bits(ends[i]) for i in range(2)] == old
    assert {c.adapter_version for c in ends.values()} == {info.version - 1}
    assert {c.adapter_version for c in during} == {info.version}
    assert list(map(bits, during)) != old
    assert list(map(bits, one.generate(batch, greedy(12), "policy"))) == list(map(bits, during))


def test_without_a_slot_an_update_is_refused(one):
    adapter = golden(one, FAMILY, "attn")
    for i in range(8):
        one.update_adapter(f"a{i}", params_of(adapter))
    streams = [one.stream(prompts([4]), greedy(20), f"a{i}") for i in range(8)]
    next(streams[0])
    before = one.adapters()
    for name in ("a3", "new"):
        with pytest.raises(AdapterError, match="no slot can be had") as caught:
            one.update_adapter(name, params_of(adapter, 2.0))
        assert "max_adapters" in caught.value.hint
    assert one.adapters() == before
    streams[5].close()
    assert one.update_adapter("a3", params_of(adapter, 2.0)).slot == before[5].slot
    for stream in streams:
        stream.close()


def test_an_evicted_version_comes_back_from_the_host(one):
    adapter = golden(one, FAMILY, "experts")
    one.update_adapter("policy", params_of(adapter))
    expected = probe(one, "policy")
    compilations = one.stats().compilations
    for i in range(8):
        one.load_adapter(f"a{i}", constant_adapter(one, 0.01))
        one.score(prompts([3]), [f"a{i}"])
    info = next(info for info in one.adapters() if info.name == "policy")
    assert info.slot is None and info.nbytes > 0
    assert probe(one, "policy") == expected
    assert one.stats().compilations == compilations


def test_bad_parameters_change_nothing(one):
    adapter = golden(one, FAMILY, "experts")
    one.update_adapter("policy", params_of(adapter))
    expected, before = probe(one, "policy"), one.adapters()
    name = next(iter(adapter.pairs))
    for broken in (np.nan, np.inf):
        bad = params_of(adapter)
        bad[name] = LoraPair(
            bad[name].a.at[0, 0, 0].set(broken), bad[name].b, bad[name].scaling, bad[name].ranks
        )
        with pytest.raises(AdapterError, match="not finite") as caught:
            one.update_adapter("policy", bad)
        assert caught.value.key == name
    for bad in (None, [], {"nothing": 1}, params_of(constant_adapter(one, 1.0, rank=17))):
        with pytest.raises(AdapterError):
            one.update_adapter("policy", bad)
    with pytest.raises(AdapterError):
        one.update_adapter("a/b", params_of(adapter))
    assert (probe(one, "policy"), one.adapters()) == (expected, before)


def test_a_write_that_fails_leaves_no_adapter_without_values(one, monkeypatch):
    """Out of memory on the device, say: others go on, and the name is free."""
    adapter = golden(one, FAMILY, "experts")
    one.update_adapter("policy", params_of(adapter))
    expected = probe(one, "policy")
    began = one.stream(prompts([4]), greedy(6), "policy")
    next(began)

    def fail(slot, params):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(one._writer, "write", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            one.update_adapter("policy", params_of(adapter, 2.0))
    assert one.adapters() == []
    with pytest.raises(RequestError, match="not loaded"):
        one.generate(prompts([4]), greedy(2), "policy")
    assert len(list(began)) == 5, "with the version that it began with"
    one.generate(prompts([4]), greedy(2))
    one.update_adapter("policy", params_of(adapter))
    assert probe(one, "policy") == expected


def test_no_projection_at_all_is_the_base(one):
    info = one.update_adapter("nothing", {})
    assert info.targets == () and probe(one, "nothing") == probe(one, None)
