"""A bank in rank classes whose layers lie in one array of each kind, as they do for GPUs, holds the
bits of one that is not."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_jax import Engine, Trainer, read_adapter
from lora_moe_jax.models import build
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import constant_adapter, load_golden, probe, prompts
from tests.training.conftest import BUCKETS, ENGINE
from tests.training.helpers import add, data, gradients, same, scores, state

# deepseek_v3: a first layer without experts, and kv_b.
FAMILIES = ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
SMALL = 2
CLASSES = {SMALL: 2, ENGINE["max_rank"]: 2}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def classes(family) -> tuple[Engine, Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "stacks_layers", lambda dtype: True)
        options = ENGINE | {"max_rank": CLASSES}
        engine = Engine.from_pretrained(GOLDEN / family / "base", dtype="float32", **options)
    trainer = Trainer(engine, token_buckets=BUCKETS)
    assert engine.bank.ranks == (SMALL, SMALL, *[ENGINE["max_rank"]] * 2)
    assert len(engine.bank.stacks[SMALL]) < len(engine.bank.projections)
    return engine, trainer


def test_adapters_are_served_as_from_slots_that_are_alike(pair, family, classes):
    alike, several = pair(family)[0], classes[0]
    assert several.stats().bank_bytes < alike.stats().bank_bytes
    for engine in (alike, several):
        load_golden(engine, family, ["attn"])
        engine.load_adapter("small", constant_adapter(engine, 0.01, SMALL))
    slots = {info.name: info.slot for info in several.adapters()}
    assert several.bank.ranks[slots["attn"]] > several.bank.ranks[slots["small"]] == SMALL
    mixed = prompts([20, 20, 20, 20], seed=1), [None, "attn", "small", "attn"]
    one, other = (engine.score(*mixed, return_logits=True) for engine in (alike, several))
    assert [s.logits.tobytes() for s in one] == [s.logits.tobytes() for s in other]
    assert len({s.logits.tobytes() for s in one}) == len(one)
    assert probe(several) == probe(alike)
    several.sleep(2)
    several.wake()
    assert probe(several, "attn") == probe(alike, "attn") != probe(alike)
    for name in ("attn", "small"):
        several.unload_adapter(name)


@pytest.mark.slow
def test_adapters_are_trained_as_in_slots_that_are_alike(pair, family, classes):
    """All that there is of two adapters after a step, and the gradients and logprobs of both.

    Within rounding: what a compiler contracts depends on the program (XLA:CPU's does, if it is not
    to optimize). Inside an engine the trainer's logprobs are those of serving, bit for bit.
    """
    batch, found = data([("a", 30), ("b", 25)]), []
    for engine, trainer in (pair(family), classes):
        add(trainer, engine, "a", 0, rank=SMALL)
        add(trainer, engine, "b", 1)
        logprobs = trainer.forward_backward(batch).logprobs
        assert same(scores(engine, batch), logprobs)
        of_both = [array for name in "ab" for array in gradients(trainer, name)]
        in_slots = [array for name in "ab" for array in state(trainer, engine, name)]
        found.append([*logprobs, *of_both, *in_slots])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(one).max(initial=0))


def test_a_slot_is_read_back_after_an_eviction(family, classes):
    engine, _ = classes
    adapter = read_adapter(GOLDEN / family / "adapters" / "attn", engine.bank.projections)
    engine.update_adapter("mine", constant_adapter(engine, 0.01, SMALL))
    expected = probe(engine, "mine")
    for number in range(engine.options.max_adapters):
        engine.load_adapter(str(number), adapter)
        probe(engine, str(number))
    assert probe(engine, "mine") == expected
