"""A bank whose layers lie in one array of each kind, as they do for GPUs, holds the same bits."""

from __future__ import annotations

import pytest

from lora_moe_jax import Engine, Trainer, read_adapter
from lora_moe_jax.serving import model_arrays
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import load_golden, probe
from tests.training.conftest import BUCKETS, ENGINE
from tests.training.helpers import add, data, gradients, same, scores, state

# deepseek_v3: a first layer without experts, and kv_b.
FAMILIES = ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def joined(family) -> tuple[Engine, Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_arrays, "reads_slices_in_place", lambda: True)
        engine = Engine.from_pretrained(GOLDEN / family / "base", dtype="float32", **ENGINE)
    trainer = Trainer(engine, token_buckets=BUCKETS)
    assert len(engine.bank.stacks) < len(engine.bank.projections)
    return engine, trainer


def test_adapters_are_served_as_from_arrays_apart(pair, family, joined):
    apart, together = pair(family)[0], joined[0]
    for engine in (apart, together):
        load_golden(engine, family, ["attn"])
    assert probe(together, "attn") == probe(apart, "attn") != probe(apart)
    assert probe(together) == probe(apart)
    together.sleep(2)
    together.wake()
    assert probe(together, "attn") == probe(apart, "attn")
    together.unload_adapter("attn")


def test_adapters_are_trained_as_in_arrays_apart(pair, family, joined):
    """All that there is of two adapters after a step, and the gradients and logprobs of both."""
    batch, found = data([("a", 30), ("b", 25)]), []
    for engine, trainer in (pair(family), joined):
        for seed, name in enumerate("ab"):
            add(trainer, engine, name, seed)
        logprobs = trainer.forward_backward(batch).logprobs
        assert same(scores(engine, batch), logprobs)
        of_both = [array for name in "ab" for array in gradients(trainer, name)]
        in_slots = [array for name in "ab" for array in state(trainer, engine, name)]
        found.append([*logprobs, *of_both, *in_slots])
    assert same(*found)


def test_a_slot_is_read_back_after_an_eviction(family, joined):
    engine, _ = joined
    adapter = read_adapter(GOLDEN / family / "adapters" / "attn", engine.bank.projections)
    expected = probe(engine, "a")
    for number in range(engine.options.max_adapters):
        engine.load_adapter(str(number), adapter)
        probe(engine, str(number))
    assert probe(engine, "a") == expected
