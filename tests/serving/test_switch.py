"""`update_policy="switch"`: requests go on with a new version that is written over the old one.

The reference is an engine of the other policy, stepped as often, whose slot is written over past
its pool; and, where nothing of an older version is left, one that has only ever had the new one.
"""

from __future__ import annotations

import dataclasses
import gc

import jax
import numpy as np
import pytest

from lora_moe_jax import AdapterError, ConfigError, Engine, read_adapter
from lora_moe_jax.adapters import Adapter, LoraPair
from lora_moe_jax.adapters.device_params import DeviceParams
from lora_moe_jax.serving.request import scores
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import bits, greedy, prompts, sampled

FAMILY = "qwen3_moe"
CHUNK = 7
PROMPT = prompts([20], seed=4)[0]  # three chunks: the third step begins the first token
OPTIONS = {
    "dtype": "float32",
    "max_adapters": 2,
    "max_rank": 16,
    "max_length": 96,
    "max_requests": 3,
    "page_size": 8,
    "token_buckets": (24,),
    "decode_steps": 3,
}


@pytest.fixture(scope="module")
def switching() -> Engine:
    return Engine.from_pretrained(GOLDEN / FAMILY / "base", **OPTIONS, update_policy="switch")


@pytest.fixture
def one(switching) -> Engine:
    """Two slots; idle and empty before and after; several steps at once only if asked for."""
    scheduler = switching._runner.scheduler
    scheduler.prefill_chunk, scheduler.decode_steps, scheduler.prefix_cache = CHUNK, 1, True
    yield switching
    for info in switching.adapters():
        switching.unload_adapter(info.name)
    stats = switching.stats()
    assert (stats.running, stats.waiting, stats.resident_adapters) == (0, 0, 0)
    assert stats.free_pages == stats.total_pages and stats.adapter_host_bytes == 0
    scheduler.pool.give_back(scheduler.pool.take(scheduler.pool.free))


@pytest.fixture
def plain(engine) -> Engine:
    """The shared engine, of the policy "finish", without its prefix cache."""
    made = engine(FAMILY)
    made._runner.scheduler.prefill_chunk = CHUNK
    return made


def version(one: Engine, number: int) -> Adapter:
    """The version that the tests load as this one: each has other factors."""
    adapter = read_adapter(GOLDEN / FAMILY / "adapters" / "experts", one.bank.projections)
    pairs = {
        name: LoraPair(pair.a, pair.b * np.float32(1.0 + number), pair.scaling, pair.ranks)
        for name, pair in adapter.pairs.items()
    }
    return Adapter(pairs, adapter.layout, adapter.config)


def new_version(one: Engine, number: int, how: str = "update"):
    info = {"update": one.update_adapter, "load": one.load_adapter}[how](
        "policy", version(one, number)
    )
    assert info.slot is not None
    return info


def stepped(one: Engine, steps: int, adapter: str | None = "policy", params=None, prompt=PROMPT):
    """A stream, begun by so many steps."""
    stream = one.stream([prompt], params or greedy(12), adapter)
    for _ in range(steps):
        one._runner.step()
    return stream


def end(stream):
    """The completion of a stream of one request, whose deltas say the same."""
    deltas = list(stream)
    out = deltas[-1].completion
    assert [delta.token_id for delta in deltas] == out.token_ids
    versions = out.adapter_versions or [None] * len(deltas)
    assert [delta.adapter_version for delta in deltas] == versions
    return out


def alone(plain: Engine, number: int, params=None, prompt=PROMPT) -> tuple:
    """What a request gives under one version."""
    plain.load_adapter("only", version(plain, number))
    return bits(plain.generate([prompt], params or greedy(12), "only")[0])


def written_over(plain: Engine, steps: int, numbers, params=None) -> tuple:
    """What it gives if after so many steps, and each further one, the slot is written over."""
    slot = plain.load_adapter("reference", version(plain, 1)).slot
    stream = stepped(plain, steps, "reference", params)
    for place, number in enumerate(numbers):
        if place:
            plain._runner.step()
        params_on_device = DeviceParams.of(version(plain, number), plain.bank)
        assert not list(plain._writer.write(slot, params_on_device))
    out = end(stream)
    assert out.adapter_versions == [out.adapter_version] * len(out.token_ids)
    plain.unload_adapter("reference")
    return bits(out)


def test_there_are_two_policies():
    for wrong in ("", "Switch", None, True, 1, ["switch"]):
        with pytest.raises(ConfigError, match="update") as caught:
            Engine.from_pretrained(GOLDEN / FAMILY / "base", **OPTIONS, update_policy=wrong)
        assert caught.value.key == "update_policy"


@pytest.mark.parametrize("how", ["update", "load"])
@pytest.mark.parametrize("params", [greedy(12), sampled(5, 12)], ids=["greedy", "sampled"])
def test_a_request_goes_on_with_the_new_version(one, plain, how, params):
    """In the midst of its prompt, at its first token, later, with a step under way each time."""
    pure = [alone(plain, number, params) for number in (1, 2)]
    for steps in (1, 2, 3, 4, 9):
        first = new_version(one, 1, how)
        stream = stepped(one, steps, params=params)
        second = new_version(one, 2, how)
        assert (second.slot, second.version) == (first.slot, first.version + 1)
        assert one.stats().resident_adapters == 1
        out = end(stream)
        old = max(steps - 2, 0)  # the last of them was begun and not read
        assert out.adapter_versions == [first.version] * old + [second.version] * (12 - old)
        assert out.adapter_version == first.version
        assert bits(out) == written_over(plain, steps, [2], params)
        (tokens, logprobs), end_of_old = bits(out), 4 * old
        assert (tokens[:old], logprobs[:end_of_old]) == (
            pure[0][0][:old],
            pure[0][1][:end_of_old],
        )
        assert logprobs[end_of_old:][:4] != pure[0][1][end_of_old:][:4]
        assert bits(out) != pure[1], "what is in the cache is the old version's"


def test_several_steps_at_once_are_of_one_version(one, plain):
    pure = alone(plain, 1)
    for steps in (3, 4, 5, 6):
        one._runner.scheduler.decode_steps = 3
        first = new_version(one, 1)
        stream = stepped(one, steps)
        second = new_version(one, 2)
        out = end(stream)
        old = 1 + 3 * (steps - 3)
        assert out.adapter_versions == [first.version] * old + [second.version] * (12 - old)
        assert bits(out)[0][:old] == pure[0][:old]
        assert bits(out) == written_over(plain, old + 2, [2])


def test_others_do_not_notice(one, plain):
    """Those of another adapter, and of none, beside three switches; the other has no more slots."""
    folder = GOLDEN / FAMILY / "adapters" / "attn"
    for each in (plain, one):
        other = each.load_adapter("other", folder).version
    prompt, params = prompts([30], seed=8)[0], sampled(3, 20)
    wanted = [bits(plain.generate([prompt], params, name)[0]) for name in ("other", None)]
    info, before = new_version(one, 1), one.stats().adapter_evictions
    streams = [one.stream([prompt], params, name) for name in ("other", None)]
    stream = stepped(one, 4)
    for number in (2, 3, 4):
        if number > 2:
            one._runner.step()
        new_version(one, number)
    assert one.stats().running == 3 and one.stats().adapter_evictions == before
    others = [end(each) for each in streams]
    assert [bits(out) for out in others] == wanted
    assert others[0].adapter_versions == [other] * 20 and others[1].adapter_versions is None
    out = end(stream)
    assert out.adapter_versions[-1] == info.version + 3
    assert sorted(out.adapter_versions) == out.adapter_versions


def test_each_of_several_switches_counts(one, plain):
    first = new_version(one, 1).version
    stream = stepped(one, 4)
    for number in (2, 3, 4):
        if number > 2:
            one._runner.step()
        new_version(one, number)
    out = end(stream)
    assert out.adapter_versions == [first] * 2 + [first + 1, first + 2] + [first + 3] * 8
    assert bits(out) == written_over(plain, 4, [2, 3, 4])


def test_pages_are_not_shared_across_a_switch(one, plain):
    """Not those from before, nor those of requests that went on, nor what they had found."""
    new_version(one, 1)
    assert bits(one.generate([PROMPT], greedy(12), "policy")[0]) == alone(plain, 1)
    hits = one.stats().prefix_hit_tokens
    streams = [stepped(one, steps) for steps in (2, 3)]  # they find the pages of the first
    assert one.stats().prefix_hit_tokens > hits
    new_version(one, 2)
    hits = one.stats().prefix_hit_tokens
    new = one.generate([PROMPT], greedy(12), "policy")[0]
    assert one.stats().prefix_hit_tokens == hits
    assert bits(new) == alone(plain, 2)
    fresh = one.stats().cached_pages
    mixed = [end(stream) for stream in streams]
    assert [out.adapter_versions[-1] for out in mixed] == [new.adapter_version] * 2
    # The first two pages are the new request's; beyond them nothing that the others computed.
    pages = {page.adapter for page in one._runner.scheduler.pool.prefixes._pages.values()}
    assert pages == {one._adapters.get("policy")} and one.stats().cached_pages <= fresh
    for out in mixed:
        longer = PROMPT + out.token_ids
        assert bits(one.generate([longer], greedy(4), "policy")[0]) == alone(
            plain, 2, greedy(4), longer
        )


def test_requests_that_wait_are_of_the_new_version_alone(one, plain):
    new_version(one, 1)
    others = [stepped(one, 1, None) for _ in range(3)]  # all rows
    stream = stepped(one, 3)
    assert one.stats().waiting == 1
    second = new_version(one, 2)
    out = end(stream)
    assert bits(out) == alone(plain, 2)
    assert out.adapter_version == second.version
    assert out.adapter_versions == [second.version] * 12
    for other in others:
        other.close()


def test_what_made_room_is_computed_again_by_the_new_version(one, plain):
    """Its tokens stay; the rest is as if they had been given to the new version."""
    first, scheduler = new_version(one, 1), one._runner.scheduler
    stream = stepped(one, 7)
    one._runner.drain()
    scheduler._preempt(stream.requests[0])
    second = new_version(one, 2)
    out = end(stream)
    assert out.adapter_versions == [first.version] * 5 + [second.version] * 7
    assert out.adapter_version == first.version
    assert bits(out)[0][:5] == alone(plain, 1)[0][:5]
    begun = PROMPT + out.token_ids[:5]
    rest = alone(plain, 2, greedy(7), begun)
    assert (tuple(out.token_ids[5:]), bits(out)[1][20:]) == rest
    hits = one.stats().prefix_hit_tokens
    assert bits(one.generate([begun], greedy(7), "policy")[0]) == rest
    assert one.stats().prefix_hit_tokens > hits, "it shares again"


def test_a_score_is_of_one_version(one, plain):
    tokens = prompts([40], seed=2)[0]  # six chunks
    wanted = {}
    for number in (1, 2):
        plain.load_adapter("only", version(plain, number))
        wanted[number] = plain.score([tokens], ["only"])[0].logprobs.tobytes()
    assert wanted[1] != wanted[2]
    for steps, number in ((0, 2), (1, 2), (3, 2), (5, 2), (6, 1)):
        first = new_version(one, 1)
        stream = one._open_scores([tokens], ["policy"], False, 0, 0)
        for _ in range(steps):
            one._runner.step()
        second = new_version(one, 2)
        assert list(stream) == []
        (score,) = scores(stream.requests)
        assert score.logprobs.tobytes() == wanted[number], steps
        assert score.adapter_version == {1: first, 2: second}[number].version


def test_a_bad_update_changes_nothing(one, plain):
    first = new_version(one, 1)
    stream, before = stepped(one, 5), one.adapters()
    bad = version(one, 2)
    name, pair = next(iter(bad.pairs.items()))
    for broken in (
        LoraPair(np.full_like(pair.a, np.nan), pair.b, pair.scaling, pair.ranks),
        LoraPair(pair.a[..., 1:], pair.b, pair.scaling, pair.ranks),
    ):
        for change in (one.update_adapter, one.load_adapter):
            with pytest.raises(AdapterError):
                change("policy", Adapter(bad.pairs | {name: broken}, bad.layout, bad.config))
    assert one.adapters() == before
    out = end(stream)
    assert bits(out) == alone(plain, 1) and out.adapter_versions == [first.version] * 12


def test_without_a_slot_an_adapter_is_updated_as_ever(one, plain, monkeypatch):
    """One is taken from an idle adapter; if none is idle the update is refused, a load waits."""
    for limit in ("LEAST_PARTS", "MOST_PARTS"):  # an adapter is in its slot after a step
        monkeypatch.setattr(f"lora_moe_jax.serving.scheduler.{limit}", 1000)
    new_version(one, 1)
    waiting = {}
    for name in ("a", "b"):
        one.load_adapter(name, version(one, 5))
        waiting[name] = stepped(one, 2, name)
    assert next(i for i in one.adapters() if i.name == "policy").slot is None
    stream = stepped(one, 1)
    with pytest.raises(AdapterError, match="no slot can be had"):
        one.update_adapter("policy", version(one, 2))
    second = one.load_adapter("policy", version(one, 3))
    assert second.slot is None
    waiting.pop("a").close()
    third = one.update_adapter("policy", version(one, 2))
    assert third.slot is not None
    out = end(stream)
    assert bits(out) == alone(plain, 2)
    assert out.adapter_versions == [third.version] * 12
    assert bits(end(waiting.pop("b"))) == alone(plain, 5)


def test_fifty_updates_beside_a_request_leave_nothing(one):
    pairs = version(one, 1)
    on_device = {
        name: LoraPair(*map(jax.numpy.asarray, (pair.a, pair.b, pair.scaling)), pair.ranks)
        for name, pair in pairs.pairs.items()
    }
    one.update_adapter("policy", on_device)
    one.generate([PROMPT], greedy(2), "policy")
    stream = stepped(one, 4, params=greedy(60))

    def held() -> tuple[int, int]:
        gc.collect()
        arrays = jax.live_arrays()
        return len(arrays), sum(array.nbytes for array in arrays)

    before, start = held(), one.stats()
    for _ in range(50):
        info = one.update_adapter("policy", on_device)
        one._runner.step()
        assert one._runner._under_way
    assert held() == before
    after = one.stats()
    assert after.compilations == start.compilations
    assert after.adapter_loads == start.adapter_loads + 50
    assert after.adapter_host_bytes == 0 and after.resident_adapters == 1
    assert len(one._adapters._retired) == 0
    first = info.version - 50
    later = [*range(first + 1, info.version), *[info.version] * 7]
    assert end(stream).adapter_versions == [first] * 4 + later


def test_a_write_that_fails_aborts_who_had_gone_on(one, monkeypatch):
    new_version(one, 1)
    mine, base = stepped(one, 5), one.stream([PROMPT], greedy(6))

    def fail(slot, params):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(one._writer, "write", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            new_version(one, 2)
    assert end_reason(mine) == "abort" and end_reason(base) == "length"
    assert one.adapters() == []
    new_version(one, 3)


def test_a_load_that_fails_is_written_again(one, monkeypatch):
    """The version has a copy on the host: who had gone on with it is computed by it."""
    first = one.load_adapter("policy", version(one, 1))
    mine, base = stepped(one, 5), one.stream([PROMPT], greedy(6))

    def fail(slot, adapter):
        raise RuntimeError("out of memory")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(one._writer, "write", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            one.load_adapter("policy", version(one, 2))
    assert end_reason(mine) == "length" and end_reason(base) == "length"
    assert [info.version for info in one.adapters()] == [first.version + 1]


def end_reason(stream) -> str:
    return str(list(stream)[-1].completion.finish_reason)


def test_a_new_version_in_another_slot(one):
    """Of a larger rank, where slots have classes; then another adapter takes the old slot."""
    classes = OPTIONS | {"max_rank": {1: 1, 16: 1}, "prefill_chunk": CHUNK, "decode_steps": 1}
    other = Engine.from_pretrained(GOLDEN / FAMILY / "base", **classes, update_policy="switch")
    small = version(one, 1)
    pairs = {
        name: LoraPair(pair.a[:, :1], pair.b[:, :1], pair.scaling, np.minimum(pair.ranks, 1))
        for name, pair in small.pairs.items()
    }
    small = Adapter(pairs, small.layout, dataclasses.replace(small.config, r=1, rank_pattern={}))
    found = []
    for its in (one, other):
        first = its.load_adapter("policy", small)
        stream = stepped(its, 6)
        second = its.load_adapter("policy", version(one, 2))
        its.load_adapter("another", small)
        out = end(stream)
        assert out.adapter_versions[0] < out.adapter_versions[-1]
        found.append((first.slot == second.slot, out))
    (in_place, expected), (elsewhere, out) = found
    assert in_place and not elsewhere
    assert out.token_ids == expected.token_ids
    np.testing.assert_allclose(out.logprobs, expected.logprobs, rtol=1e-4)
