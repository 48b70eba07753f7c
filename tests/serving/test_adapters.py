"""Adapters come and go while the engine runs: nothing compiles, and every output stays right."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from lora_moe_jax import AdapterError, Engine, read_adapter
from tests.adapters.tables import GOLDEN, golden_adapters
from tests.serving.conftest import OPTIONS
from tests.serving.helpers import (
    ADAPTERS,
    bits,
    constant_adapter,
    greedy,
    load_golden,
    probe,
    prompts,
    sampled,
)

FAMILY = "deepseek_v3"
FOLDERS = GOLDEN / FAMILY / "adapters"


@pytest.fixture
def one(engine):
    return engine(FAMILY)


def test_two_hundred_random_operations(one):
    """Every output equals that of the adapter alone in the engine, cached before.

    There are more names than slots.
    """
    sources = [None, *golden_adapters(FAMILY)]
    batch = prompts([3, 18, 9, 30])
    params = [greedy(5), sampled(3, 5), greedy(5), sampled(4, 5, top_k=20)]
    expected = {}
    for source in sources:
        if source is not None:
            one.load_adapter("only", FOLDERS / source)
        name = None if source is None else "only"
        for i, prompt in enumerate(batch):
            generated = bits(one.generate([prompt], params[i], [name])[0])
            scored = one.score([prompt], [name])[0].logprobs.tobytes()
            expected[source, i] = generated, scored
    one.unload_adapter("only")
    for i in range(len(batch)):  # one is the other in an older layout
        assert expected["experts", i] == expected["experts_swapped", i]
    assert len(set(expected.values())) == len(expected) - len(batch), "the others differ"

    rng = np.random.default_rng(0)
    compilations, evictions = one.stats().compilations, one.stats().adapter_evictions
    most = 0
    loaded: dict[str, str] = {}  # name -> source
    versions: dict[str, int] = {}
    done = dict.fromkeys(("load", "replace", "unload", "generate", "score"), 0)
    for _ in range(200):
        action = rng.choice([*done, "load"])  # twice, so that there are many
        name = f"a{rng.integers(12)}"
        if action == "load" and name not in loaded:
            loaded[name] = str(rng.choice(sources[1:]))
        elif action == "replace" and loaded:
            name = str(rng.choice(list(loaded)))
            loaded[name] = str(rng.choice(sources[1:]))
        elif action == "unload" and loaded:
            name = str(rng.choice(list(loaded)))
            one.unload_adapter(name)
            del loaded[name]
        elif action in ("generate", "score"):
            picks = rng.integers(len(batch), size=rng.integers(1, 9))
            names = [str(n) if n else None for n in rng.choice([*loaded, ""], len(picks))]
            inputs = [batch[i] for i in picks]
            wanted = [expected[loaded.get(n), i] for n, i in zip(names, picks, strict=True)]
            if action == "generate":
                outs = one.generate(inputs, [params[i] for i in picks], names)
                assert list(map(bits, outs)) == [generated for generated, _ in wanted]
            else:
                outs = one.score(inputs, names)
                assert [out.logprobs.tobytes() for out in outs] == [scored for _, scored in wanted]
            assert [out.adapter for out in outs] == names
            assert [out.adapter_version for out in outs] == [versions.get(n) for n in names]
        else:
            continue
        if action in ("load", "replace"):
            info = one.load_adapter(name, FOLDERS / loaded[name])
            assert info.version == versions.get(name, info.version - 1) + 1
            versions[name] = info.version
        done[action] += 1
        assert {info.name for info in one.adapters()} == set(loaded)
        slots = [info.slot for info in one.adapters() if info.slot is not None]
        assert len(set(slots)) == len(slots) == one.stats().resident_adapters
        most = max(most, len(loaded))
    assert most > one.options.max_adapters and one.stats().adapter_evictions > evictions
    assert min(done.values()) > 20, done
    assert one.stats().compilations == compilations


def test_what_is_known_of_a_loaded_adapter(one):
    info = one.load_adapter("poet", FOLDERS / "per_expert")
    adapter = read_adapter(FOLDERS / "per_expert", one.bank.projections)
    assert (info.name, info.slot, info.layout) == ("poet", 0, "per_expert")
    assert (info.rank, info.targets, info.nbytes) == (
        adapter.rank,
        adapter.targets,
        adapter.nbytes,
    )
    assert one.adapters() == [info]
    assert one.stats().adapters == 1 and one.stats().free_adapter_slots == 7


def test_versions_count_up_even_after_unloading(one):
    first = one.load_adapter("counted", FOLDERS / "attn").version
    assert one.load_adapter("counted", FOLDERS / "experts").version == first + 1
    one.unload_adapter("counted")
    assert one.load_adapter("counted", FOLDERS / "attn").version == first + 2
    assert one.generate([[5, 6]], greedy(2), "counted")[0].adapter_version == first + 2


def test_an_adapter_in_memory_equals_its_folder(one):
    one.load_adapter("folder", FOLDERS / "experts")
    adapter = read_adapter(FOLDERS / "experts", one.bank.projections)
    one.load_adapter("memory", adapter)
    assert probe(one, "folder") == probe(one, "memory") != probe(one)


def test_replacing_leaves_nothing_of_the_old_adapter(one):
    """`attn` has none of the projections that `experts` has, and a smaller rank than the first."""
    one.load_adapter("fresh", FOLDERS / "attn")
    one.load_adapter("used", constant_adapter(one, 0.5))
    one.load_adapter("used", FOLDERS / "experts")
    one.load_adapter("used", FOLDERS / "attn")
    assert probe(one, "used") == probe(one, "fresh")
    slots = {info.name: info.slot for info in one.adapters()}
    for name, lora in one.bank.arrays.items():
        for array in lora:
            assert np.array_equal(array[slots["used"]], array[slots["fresh"]]), name


def test_an_adapter_in_use_is_left_alone(one):
    load_golden(one, FAMILY)
    expected = bits(one.generate([[5, 6, 7]], greedy(10), ["attn"])[0])
    running = one.stream([[5, 6, 7]], greedy(10), ["attn"])
    next(running)
    waiting = one.stream([[5, 6, 7]] * 9, greedy(10), ["rslora"] * 9)
    for name in ("attn", "rslora"):
        with pytest.raises(AdapterError, match="in use"):
            one.unload_adapter(name)
    one.load_adapter("experts", FOLDERS / "attn")
    one.load_adapter("new", FOLDERS / "experts")
    assert bits(list(running)[-1].completion) == expected
    one.unload_adapter("attn")
    waiting.close()
    one.unload_adapter("rslora")


def test_full_slots(one):
    for i in range(8):
        assert one.load_adapter(f"a{i}", FOLDERS / ADAPTERS[i % 3]).slot == i
    before = probe(one, "a3")
    assert one.load_adapter("a8", FOLDERS / "attn").slot is None
    assert one.load_adapter("a5", FOLDERS / "attn").slot == 5
    one.unload_adapter("a2")
    assert one.load_adapter("a9", FOLDERS / "attn").slot == 2
    assert probe(one, "a8") == probe(one, "a9") == before
    slots = {info.name: info.slot for info in one.adapters()}
    assert slots["a8"] == 0 and slots["a0"] is None, "the one that was not used for longest"
    assert probe(one, "a3") == before


def test_unloading_what_is_not_loaded(one):
    load_golden(one, FAMILY, ["attn"])
    for name in ("other", "attn.", "ATTN"):
        with pytest.raises(AdapterError, match="no adapter of this name"):
            one.unload_adapter(name)
    one.unload_adapter("attn")
    with pytest.raises(AdapterError, match="no adapter of this name"):
        one.unload_adapter("attn")


def test_the_folder_may_go_after_loading(one, tmp_path):
    """Nothing of the file stays mapped: deleting or overwriting it changes nothing."""
    folder = tmp_path / "adapter"
    shutil.copytree(FOLDERS / "experts", folder)
    one.load_adapter("gone", folder)
    before = probe(one, "gone")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert probe(one, "gone") == before
    shutil.rmtree(folder)
    assert probe(one, "gone") == before


def test_the_longest_name_is_good(one):
    name = "x" * 128
    one.load_adapter(name, FOLDERS / "attn")
    assert one.generate([[1, 2]], greedy(2), name)[0].adapter == name


@pytest.mark.parametrize("on_disk", [False, True])
def test_adapters_of_a_new_engine(one, tmp_path, on_disk):
    folders = {name: FOLDERS / name for name in ADAPTERS}
    options = OPTIONS | {"adapter_disk": tmp_path if on_disk else None}
    new = Engine.from_pretrained(GOLDEN / FAMILY / "base", adapters=folders, **options)
    load_golden(one, FAMILY)
    assert [info.name for info in new.adapters()] == list(ADAPTERS)
    assert all(info.on_disk == on_disk for info in new.adapters())
    for name in (*ADAPTERS, None):
        assert probe(new, name) == probe(one, name)


@pytest.mark.parametrize(
    ("adapters", "options", "says"),
    [
        ({"a": FOLDERS / "experts"}, {"max_rank": 1}, "rank"),
        ({"a": FOLDERS / "missing"}, {}, "folder"),
        ({"a b:c": FOLDERS / "attn"}, {}, "name"),
        ({"a": FOLDERS / "attn"}, {"max_adapters": 0}, "no adapter slots"),
        ([FOLDERS / "attn"], {}, "no names"),
    ],
)
def test_a_wrong_one_is_refused_before_weights_are_loaded(adapters, options, says, monkeypatch):
    monkeypatch.setattr("lora_moe_jax.serving.engine.load_model", None)
    with pytest.raises(AdapterError, match=says):
        Engine.from_pretrained(GOLDEN / FAMILY / "base", adapters=adapters, **OPTIONS | options)
