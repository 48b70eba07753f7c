"""What an engine takes of a device's memory, before it takes it."""

from __future__ import annotations

import dataclasses
import gc
import os

import jax
import pytest
from flax import nnx

from lora_moe_jax import ConfigError, Engine
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.layers.adapter_slots import LoraParam
from lora_moe_jax.models.build import abstract_model, load_model
from lora_moe_jax.serving import engine as engine_module
from lora_moe_jax.serving import options as options_module
from lora_moe_jax.serving import sizes
from lora_moe_jax.serving.options import EngineOptions, slot_config
from lora_moe_jax.serving.sizes import MemorySizes
from lora_moe_jax.serving.steps import allocate_pages
from tests.adapters.tables import GOLDEN
from tests.serving.conftest import OPTIONS

BASES = {family: GOLDEN / family / "base" for family in ("qwen3_moe", "deepseek_v3")}
DEFAULTS = {"page_size": 16, "prefill_chunk": None}


def planned(family: str, mesh=None, targets=None, **changes):
    config = read_config(BASES[family])
    options = EngineOptions.resolve(config, **OPTIONS | DEFAULTS | changes)
    slots = slot_config(config, options, targets, False)
    model = abstract_model(config, dtype=options.dtype, adapters=slots, mesh=mesh)
    return config, options, slots, MemorySizes.of(model, options, mesh)


def test_steps_of_few_tokens_are_multiples_of_eight_but_on_hopper(monkeypatch):
    sizes = {"token_buckets": (1, 7, 9, 64, 60)}
    assert planned("qwen3_moe", **sizes)[1].token_buckets == (8, 16, 64)
    monkeypatch.setattr(options_module, "platform_implementation", lambda: "mosaic_gpu")
    assert planned("qwen3_moe", **sizes)[1].token_buckets == (8, 16, 64)
    on_hopper = planned("qwen3_moe", dtype="bfloat16", **sizes)[1]
    assert on_hopper.token_buckets == (1, 7, 16, 64)


@pytest.mark.parametrize(
    "platform, requests, length, buckets",
    [
        ("cpu", 8, 1024, (8, 128)),
        ("gpu", 8, 1024, (8, 256, 2048)),
        ("gpu", 512, 1024, (512, 2048)),
        ("tpu", 2, 1024, (8, 512)),
        ("gpu", 3, 200, (8, 256, 600)),
        ("gpu", 1, 4, (8,)),
    ],
)
def test_steps_where_nobody_says(monkeypatch, platform, requests, length, buckets):
    """A long prompt takes few steps on an accelerator; none has room that nobody can use."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(options_module, "platform_implementation", lambda: "xla")
    sizes = {"token_buckets": None, "max_requests": requests, "max_length": length}
    config = dataclasses.replace(read_config(BASES["qwen3_moe"]), max_position=length)
    options = EngineOptions.resolve(config, **OPTIONS | DEFAULTS | sizes)
    assert options.token_buckets == buckets
    assert options.prefill_chunk == buckets[-1]


def test_sizes_are_those_of_the_engine(engine):
    one = engine("deepseek_v3")
    *_, found = planned("deepseek_v3")
    stats = one.stats()
    assert (found.bank, found.cache) == (stats.bank_bytes, stats.cache_bytes)
    assert found.weights == sum(array.nbytes for array in one._runner.steps.arrays.base)


@pytest.mark.skipif(jax.device_count() < 4, reason="a mesh of four")
@pytest.mark.parametrize("family", BASES)
def test_sizes_on_a_mesh_are_those_of_one_device(family):
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"))
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    config, options, slots, found = planned(family, mesh, max_adapters=1)
    checkpoint = Checkpoint.open(BASES[family], config)
    model = load_model(checkpoint, config, dtype="float32", adapters=slots, mesh=mesh)
    pages = allocate_pages(
        model, config, mesh, pages=options.pages, page_size=16, dtype=options.dtype
    )

    def local(tree) -> int:
        return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))

    _, bank, base = nnx.split(model, LoraParam, ...)
    assert found == MemorySizes(local(base), local(bank), local(pages))
    assert found.weights < planned(family, max_adapters=1)[-1].weights


def test_fewer_targets_make_a_smaller_bank():
    *_, every = planned("qwen3_moe")
    *_, some = planned("qwen3_moe", targets=["q_proj", "o_proj"])
    *_, none = planned("qwen3_moe", max_adapters=0)
    assert 0 == none.bank < some.bank < every.bank
    assert some.weights == every.weights and some.cache == every.cache


GIB = 2**30


@pytest.mark.parametrize(
    ("found", "key", "hint"),
    [
        (MemorySizes(9 * GIB, 1, 1), "mesh", "more devices"),
        (MemorySizes(4 * GIB, 6 * GIB, 1 * GIB), "max_adapters", "target_modules"),
        (MemorySizes(4 * GIB, 1 * GIB, 6 * GIB), "cache_tokens", "max_length"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sizes(found, key, hint):
    with pytest.raises(ConfigError, match="does not fit") as caught:
        found.check(8 * GIB)
    assert caught.value.key == key and hint in caught.value.hint
    assert "8.00 GiB" in caught.value.expected and "weights" in caught.value.found
    found.check(20 * GIB)
    found.check(None)


def test_the_engine_refuses_before_it_allocates(monkeypatch, capsys):
    def never(*arguments, **options):
        raise AssertionError("it allocates")

    *_, needed = planned("qwen3_moe")
    total = needed.weights + needed.bank + needed.cache
    monkeypatch.setattr(engine_module, "free_bytes", lambda mesh: total - 1)
    monkeypatch.setattr(engine_module, "load_model", never)
    with pytest.raises(ConfigError, match="does not fit"):
        Engine.from_pretrained(BASES["qwen3_moe"], **OPTIONS, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["weights", "bank", "cache"]
    assert all(line.endswith("MiB") for line in lines)
    monkeypatch.setattr(engine_module, "free_bytes", lambda mesh: total)
    with pytest.raises(AssertionError, match="it allocates"):
        Engine.from_pretrained(BASES["qwen3_moe"], **OPTIONS)


class FakeDevice:
    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


def test_free_memory_is_that_of_the_fullest_device(monkeypatch):
    def devices(*stats):
        monkeypatch.setattr(sizes.jax, "local_devices", lambda: [FakeDevice(s) for s in stats])

    devices({"bytes_limit": 100, "bytes_in_use": 30})
    assert sizes.free_bytes(None) == 70
    devices(None)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert sizes.free_bytes(None) == machine
    monkeypatch.setattr(sizes.jax, "default_backend", lambda: "tpu")
    assert sizes.free_bytes(None) is None

    class Mesh:
        local_devices = [
            FakeDevice({"bytes_limit": 100, "bytes_in_use": used}) for used in (10, 60, 5)
        ]

    assert sizes.free_bytes(Mesh) == 40


def test_an_engine_that_is_gone_leaves_no_programs():
    """Many in one process would take all its memory maps, and its memory."""
    client = jax.local_devices()[0].client
    sizes = OPTIONS | {"max_adapters": 1, "token_buckets": (8,), "max_logprobs": 1}
    for _ in range(2):
        before = len(client.live_executables())
        engine = Engine.from_pretrained(BASES["qwen3_moe"], **sizes)
        there = len(client.live_executables())
        assert there > before
        del engine
        gc.collect()
    assert len(client.live_executables()) == before


def test_a_rank_that_no_product_can_have():
    with pytest.raises(ConfigError, match="out of range") as error:
        Engine.from_pretrained(BASES["qwen3_moe"], max_rank={8: 1, 100_000: 1}, max_adapters=2)
    assert error.value.key == "max_rank" and "at most 1024" in error.value.expected
