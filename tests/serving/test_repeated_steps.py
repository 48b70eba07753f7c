"""Steps for which the host sends nothing: they are most of a decode, and no bit changes by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from lora_moe_jax import Engine
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import greedy, load_golden, prompts, sampled, with_options

FAMILY = "qwen3"
NAMES = ["attn", None, "rslora", None, "attn", "attn", None, "rslora"]
LENGTHS = [4, 30, 1, 17, 9, 33, 2, 25]


@pytest.fixture
def one(engine) -> Engine:
    made = engine(FAMILY)
    load_golden(made, FAMILY, ["attn", "rslora"])
    made._runner.scheduler.prefix_cache = True
    return made


@pytest.fixture
def sent(one, monkeypatch) -> list[bool]:
    """Of each step that is begun, whether the host sends it anything."""
    begun, run = [], one._runner.steps.run

    def recorded(batch):
        begun.append(batch.packed is not None)
        return run(batch)

    monkeypatch.setattr(one._runner.steps, "run", recorded)
    return begun


@contextmanager
def always_sending(engine: Engine) -> Iterator[None]:
    """And with an empty cache, before and after."""
    scheduler = engine._runner.scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_steps_alike", lambda batch: 0)
        scheduler.pool.give_back(scheduler.pool.take(scheduler.pool.free))
        yield
    scheduler.pool.give_back(scheduler.pool.take(scheduler.pool.free))


def test_most_steps_send_nothing(one, sent):
    before = one.stats()
    one.generate(prompts(range(8, 16)), sampled(1, 80), NAMES)
    after = one.stats()
    assert after.compilations == before.compilations
    # The prompts, the first tokens, and every 16th or so for pages of 16 tokens.
    assert len(sent) == after.steps - before.steps == 80
    assert 2 < sum(sent) <= 8


@pytest.mark.parametrize("logprobs", [0, 3])
def test_the_bits_are_those_of_steps_that_are_sent(one, sent, logprobs):
    """Of requests that begin and end at different times; one has a filter, and ends early."""
    batch = prompts(LENGTHS)
    params = [
        greedy(50, logprobs=logprobs),
        sampled(1, 60),
        sampled(2, 8, top_k=5),
        greedy(60),
        sampled(4, 60, temperature=0.7),
        greedy(33),
        sampled(5, 61, logprobs=logprobs),
        greedy(1),
    ]

    def outputs() -> list:
        sent.clear()
        first = one.stream(batch[:5], params[:5], NAMES[:5])
        seen = [next(first) for _ in range(90)]
        outs = one.generate(batch[5:], params[5:], NAMES[5:])
        return [*(d.completion for d in [*seen, *first] if d.completion), *outs]

    with always_sending(one):
        expected = outputs()
        assert all(sent)
    assert outputs() == expected and len(expected) == 8
    assert sum(sent) < len(sent) / 2
    assert all(np.isfinite(out.logprobs).all() for out in expected)


def test_who_comes_and_goes_is_sent(one, sent):
    batch = prompts([4, 7, 5, 6])

    def outputs() -> tuple[list, list[int]]:
        sent.clear()
        stream = one.stream(batch[:3], greedy(30), NAMES[:3])
        seen = [next(stream) for _ in range(3 * 4)]
        assert len(sent) == 5
        stream.abort(1)
        seen += [next(stream) for _ in range(1 + 2 * 3)]
        assert len(sent) == 8
        late = one.stream(batch[3:4], sampled(3, 9), NAMES[3:4])
        seen += [next(stream) for _ in range(2 * 4)]
        when = [step for step, was_sent in enumerate(sent) if was_sent]
        return [d.completion for d in [*seen, *stream, *late] if d.completion], when

    with always_sending(one):
        expected, when = outputs()
        assert when == list(range(12))
    found, when = outputs()
    assert found == expected and len(found) == 4
    # The prompts and the first tokens; without the one that was aborted; the new one's prompt, and
    # its first token.
    assert when == [0, 1, 5, 8, 9]


def test_who_goes_on_with_a_new_version_is_sent(one, sent, monkeypatch):
    """In the slot that the old one had. What each token is of, and what it is, is as it was."""
    found = []
    for always in (True, False):
        engine = with_options(one, update_policy="switch")
        if always:
            monkeypatch.setattr(engine._runner.scheduler, "_steps_alike", lambda batch: 0)
        engine.load_adapter("changing", GOLDEN / FAMILY / "adapters" / "attn")
        stream = engine.stream(prompts([9, 5]), greedy(30), ["changing", None])
        seen = [next(stream) for _ in range(16)]
        assert sent[-1] == always
        engine.load_adapter("changing", GOLDEN / FAMILY / "adapters" / "rslora")
        begun = len(sent)
        seen += stream
        assert sent[begun]
        found.append([d.completion for d in seen if d.completion])
        engine.unload_adapter("changing")
    assert found[0] == found[1]
    (switched,) = (out for out in found[1] if out.adapter)
    assert set(switched.adapter_versions) == {1, 2}
