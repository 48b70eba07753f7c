"""Engines with other options than the shared ones. Each compiles its own, so they are few."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_jax import AdapterError, Engine, RequestError
from tests.adapters.tables import GOLDEN
from tests.serving.conftest import OPTIONS
from tests.serving.helpers import bits, greedy, prompts

FAMILY = "qwen3_moe"
BASE, FOLDERS = GOLDEN / FAMILY / "base", GOLDEN / FAMILY / "adapters"


def worst(engine, golden, adapter: str) -> float:
    reference = golden(FAMILY)
    scores = engine.score(reference.input_ids.tolist(), adapter, return_logits=True)
    found = np.stack([score.logits for score in scores])
    return float(np.abs(found - reference.logits[adapter]).max())


@pytest.mark.slow
def test_one_factor_for_all_experts(golden):
    one = Engine.from_pretrained(BASE, **OPTIONS | {"shared_outer": True})
    full = sum(  # bytes of a bank with all factors
        4 * 8 * p.groups * (16 * (p.in_features + p.out_features) + 1)
        for p in one.bank.projections.values()
    )
    assert one.bank.nbytes < full
    one.load_adapter("shared_outer", FOLDERS / "shared_outer")
    assert worst(one, golden, "shared_outer") <= 1e-4
    with pytest.raises(AdapterError, match="shared_outer=False"):
        one.load_adapter("per_expert", FOLDERS / "per_expert")
    assert [info.name for info in one.adapters()] == ["shared_outer"]


@pytest.mark.slow
def test_only_some_modules_have_slots(golden):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    one = Engine.from_pretrained(BASE, **OPTIONS | {"target_modules": targets})
    assert {name.rsplit(".", 1)[-1] for name in one.bank.projections} == set(targets)
    one.load_adapter("attn", FOLDERS / "attn")
    assert worst(one, golden, "attn") <= 1e-4
    with pytest.raises(AdapterError):
        one.load_adapter("experts", FOLDERS / "experts")


@pytest.mark.slow
def test_no_adapters_at_all(engine):
    one = Engine.from_pretrained(BASE, **OPTIONS | {"max_adapters": 0})
    assert one.bank.nbytes == 0 and one.stats().free_adapter_slots == 0
    with pytest.raises(AdapterError, match="max_adapters"):
        one.load_adapter("attn", FOLDERS / "attn")
    with pytest.raises(RequestError):
        one.score([[1, 2]], ["attn"])
    batch = prompts([3, 30])
    expected = engine(FAMILY).generate(batch, greedy(5))
    assert list(map(bits, one.generate(batch, greedy(5)))) == list(map(bits, expected))


@pytest.mark.slow
def test_other_sizes_give_the_same_bits(engine):
    """Buckets, page size, rows, slots and memory are not part of what a row is."""
    sizes = {"token_buckets": [24], "page_size": 5, "max_requests": 3, "max_adapters": 2}
    sizes["cache_tokens"] = 130  # of one request as long as any
    one, other = Engine.from_pretrained(BASE, **OPTIONS | sizes), engine(FAMILY)
    for some in (one, other):
        some.load_adapter("experts", FOLDERS / "experts")
    batch, names = prompts([3, 30, 17, 61, 8]), ["experts", None, "experts", None, None]
    expected = other.generate(batch, greedy(9), names)
    assert list(map(bits, one.generate(batch, greedy(9), names))) == list(map(bits, expected))
    long = prompts([50, 60, 55])
    assert list(map(bits, one.generate(long, greedy(30)))) == list(
        map(bits, other.generate(long, greedy(30)))
    )
    assert one.stats().preemptions > 0 and one.stats().total_pages == 26


@pytest.mark.slow
def test_bfloat16_is_as_exact():
    """Alone, in a batch, in chunks, generated or scored: the same bits in bfloat16 too."""
    one = Engine.from_pretrained(BASE, **OPTIONS | {"dtype": "bfloat16"})
    one.load_adapter("experts", FOLDERS / "experts")
    batch, names = prompts([3, 30, 17, 61]), ["experts", None, "experts", None]
    outs = one.generate(batch, greedy(9), names)
    for prompt, name, out in zip(batch, names, outs, strict=True):
        assert bits(one.generate([prompt], greedy(9), [name])[0]) == bits(out)
        one._runner.scheduler.prefill_chunk = 7
        score = one.score([prompt + out.token_ids], [name])[0]
        assert np.array_equal(score.logprobs[len(prompt) - 1 :], np.float32(out.logprobs))
        one._runner.scheduler.prefill_chunk = one.options.prefill_chunk
