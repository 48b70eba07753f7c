"""A row's bits depend on that row alone: not on the batch, its size, chunks, or other adapters."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from lora_moe_jax import Engine
from tests.adapters.tables import FAMILIES, GOLDEN
from tests.serving.conftest import OPTIONS
from tests.serving.helpers import bits, constant_adapter, greedy, load_golden, prompts, sampled

LENGTHS = [1, 3, 7, 12, 17, 23, 31, 40]
MIX = ["attn", None, "experts", "rslora", None, "attn", "experts", "rslora"]


QUICK = ("qwen3_moe", "deepseek_v3", "gpt_oss")  # grouped heads, latents, windows; with experts


@pytest.fixture(
    params=[
        pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
        for family in FAMILIES
    ]
)
def loaded(request, engine):
    """An engine of each family with three adapters."""
    one = engine(request.param)
    load_golden(one, request.param)
    return one


def alone(engine, batch, names, params) -> list[tuple]:
    return [
        bits(engine.generate([prompt], [chosen], [name])[0])
        for prompt, name, chosen in zip(batch, names, params, strict=True)
    ]


def test_prefill_chunks_change_nothing(loaded):
    batch = prompts([40, 25, 9])
    names = ["experts", None, "attn"]
    whole = loaded.score(batch, names, return_logits=True)
    generated = loaded.generate(batch, greedy(4), names)
    for chunk in (1, 3, 7):
        loaded._runner.scheduler.prefill_chunk = chunk
        for expected, found in zip(
            whole, loaded.score(batch, names, return_logits=True), strict=True
        ):
            assert np.array_equal(expected.logits, found.logits)
            assert np.array_equal(expected.logprobs, found.logprobs)
        again = loaded.generate(batch, greedy(4), names)
        assert list(map(bits, again)) == list(map(bits, generated))


def test_scoring_equals_generating(loaded):
    batch = prompts([5, 20, 33, 1])
    names = ["attn", "experts", None, "rslora"]
    params = [greedy(24), sampled(1, 24), greedy(17), sampled(2, 24)]
    outs = loaded.generate(batch, params, names)
    sequences = [out.prompt_token_ids + out.token_ids for out in outs]
    for prompt, out, score in zip(batch, outs, loaded.score(sequences, names), strict=True):
        assert out.prompt_token_ids == prompt
        assert np.array_equal(score.logprobs[len(prompt) - 1 :], np.float32(out.logprobs))


def test_a_mixed_batch_equals_each_request_alone(loaded):
    batch = prompts(LENGTHS)
    params = [greedy(6) if i % 2 else sampled(i, 6) for i in range(8)]
    together = list(map(bits, loaded.generate(batch, params, MIX)))
    assert together == alone(loaded, batch, MIX, params)
    reverse = loaded.generate(batch[::-1], params[::-1], MIX[::-1])
    assert list(map(bits, reverse))[::-1] == together
    scores = loaded.score(batch, MIX, return_logits=True)
    for prompt, name, score in zip(batch, MIX, scores, strict=True):
        single = loaded.score([prompt], [name], return_logits=True)[0]
        assert np.array_equal(single.logits, score.logits)
        assert np.array_equal(single.logprobs, score.logprobs)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_leaks_out_of_a_poisoned_slot(loaded, value):
    batch, params = prompts(LENGTHS), [greedy(6)] * 8
    clean = list(map(bits, loaded.generate(batch, params, MIX)))
    info = loaded.load_adapter("poisoned", constant_adapter(loaded, 0.5))
    list(loaded._writer.write(info.slot, constant_adapter(loaded, value)))

    # The slot is there and nobody uses it.
    assert list(map(bits, loaded.generate(batch, params, MIX))) == clean

    # A request beside the others uses it.
    for place in (0, 3, 7):
        names = [*MIX[:place], "poisoned", *MIX[place + 1 :]]
        outs = loaded.generate(batch, params, names)
        assert not np.isfinite(outs[place].logprobs).any()
        found, expected = list(map(bits, outs)), list(clean)
        del found[place], expected[place]
        assert found == expected

    # It fills every page of the cache; then others get those pages.
    length = loaded.options.max_length
    scores = loaded.score(prompts([length] * 8), ["poisoned"] * 8)
    assert not any(np.isfinite(score.logprobs[1:]).any() for score in scores)
    assert list(map(bits, loaded.generate(batch, params, MIX))) == clean

    # A good adapter in its slot is as good as in any other.
    loaded.unload_adapter("poisoned")
    other = loaded.load_adapter("other", constant_adapter(loaded, 0.01))
    assert other.slot == info.slot
    first = loaded.generate(batch, params, "other")
    loaded.load_adapter("elsewhere", constant_adapter(loaded, 0.01))
    second = loaded.generate(batch, params, "elsewhere")
    assert list(map(bits, first)) == list(map(bits, second))
    assert all(np.isfinite(out.logprobs).all() for out in first)


def test_with_numbers_of_64_bits_too():
    """`jax_enable_x64`, as the program around may have set it, changes no bit."""
    batch, names = prompts([5, 9]), ["experts", None]
    found = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            one = Engine.from_pretrained(GOLDEN / "qwen3_moe/base", **OPTIONS)
            load_golden(one, "qwen3_moe")
            generated = one.generate(batch, [greedy(4), sampled(1, 4)], names)
            scored = [score.logprobs.tobytes() for score in one.score(batch, names)]
            found.append([*map(bits, generated), *scored])
    assert found[0] == found[1]
