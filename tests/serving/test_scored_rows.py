"""A long step's rows are scored some at a time: whatever is asked for has the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_jax import Engine
from lora_moe_jax.serving import steps
from lora_moe_jax.serving.step_functions import pack_scored
from tests.serving.conftest import GOLDEN, OPTIONS
from tests.serving.helpers import greedy, load_golden, prompts

FAMILY = "qwen3_moe"
NAMES = ["attn", None, "experts", None]


@pytest.fixture(scope="module")
def blocks() -> Engine:
    """Steps of 96 rows, scored 20 at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "SCORED_ROWS", 20)
        engine = Engine.from_pretrained(GOLDEN / FAMILY / "base", **OPTIONS)
    load_golden(engine, FAMILY)
    return engine


@pytest.fixture
def whole(engine) -> Engine:
    loaded = engine(FAMILY)
    load_golden(loaded, FAMILY)
    return loaded


def test_scores_of_several_blocks(blocks, whole):
    batch = prompts([33, 5, 41, 2])
    options = dict(return_logits=True, top_logprobs=3)
    found, expected = (engine.score(batch, NAMES, **options) for engine in (blocks, whole))
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)
        assert np.array_equal(one.logits, other.logits)
        assert one.top_logprobs == other.top_logprobs
    alone = blocks.score(batch, NAMES)
    assert all(map(np.array_equal, *([one.logprobs for one in its] for its in (alone, found))))


def test_scores_beside_prompts(blocks, whole):
    """Rows of prompts lie between those that are scored."""
    batch = prompts([21, 30, 25])
    stream = blocks.stream(batch, greedy(4), ["experts", None, "attn"])
    scored = blocks.score(prompts([28, 17]), ["experts", None])
    expected = whole.score(prompts([28, 17]), ["experts", None])
    for one, other in zip(scored, expected, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)
    completions = [delta.completion for delta in stream if delta.completion is not None]
    assert len(completions) == 3


def test_padding_follows_what_is_scored():
    packed = pack_scored(7, np.array([1, -1]), np.array([5, 6]), 4)
    assert packed.dtype == np.int32
    assert packed.tolist() == [7, 1, -1, 0, 0, 5, 6, 0, 0]
