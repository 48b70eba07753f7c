"""One request alone, in steps of one token, has the bits that it has among others.

Golden models are too small for the kernels that one token has on Hopper: these sizes are not.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from lora_moe_jax import Engine
from lora_moe_jax.bench.serving import Load, build_engine
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.named import named_config
from tests.serving.helpers import bits, prompts, sampled

LAYERS, HIDDEN, EXPERTS, WIDTH, HEADS, VOCAB, OUTPUT = 3, 1024, 32, 128, 8, 512, 12
LENGTHS = 3, 17, 64, 1, 40, 25
NAMES = "0", None, "1", "0", "1", None  # of adapters

pytestmark = pytest.mark.slow


def small(name: str) -> ModelConfig:
    """A named model with as many features as norms in products have, and few of all else."""
    config = named_config(name)
    moe = dataclasses.replace(config.moe, num_experts=EXPERTS, expert_size=WIDTH, shared_size=WIDTH)
    if not config.moe.shared_size:
        moe = dataclasses.replace(moe, shared_size=0)
    heads = {} if config.mla else {"num_kv_heads": 2}
    return dataclasses.replace(
        config,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        vocab_size=VOCAB,
        moe=moe,
        **heads,
    )


@pytest.fixture(scope="module", params=["qwen3-30b-a3b", "deepseek-v2-lite"])
def engine(request) -> Engine:
    loads = [Load("decode", count, max(LENGTHS), 2) for count in (len(LENGTHS), 1)]
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return build_engine(small(request.param), loads, 16, False, dtype, OUTPUT)[0]


def test_alone_among_others_and_scored(engine):
    texts = prompts(LENGTHS, vocab=VOCAB)
    params = [sampled(number, OUTPUT) for number in range(len(texts))]
    together = engine.generate(texts, params, NAMES)
    for its, text, own, name in zip(together, texts, params, NAMES, strict=True):
        engine.sleep()  # nothing of it is in the prefix cache
        engine.wake()
        (alone,) = engine.generate([text], own, [name])
        assert bits(alone) == bits(its)
        (score,) = engine.score([text + its.token_ids], [name])
        assert np.array_equal(score.logprobs[len(text) - 1 :], np.float32(its.logprobs))
    assert len({bits(its) for its in together}) == len(together)
