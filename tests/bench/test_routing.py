"""Choices of routers, as they come out of an engine's steps and of a trainer's pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax import Engine, SamplingParams
from lora_moe_jax.bench.routing import Replay, ReplayError, rerouted, run_recorded, trainer_choices
from lora_moe_jax.bench.serving import _load_adapters
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.layers.cache import single_sequence_cache
from lora_moe_jax.models.build import random_model
from lora_moe_jax.serving.options import EngineOptions
from lora_moe_jax.training import Datum, Trainer
from lora_moe_jax.training.datum import checked_rows
from lora_moe_jax.training.pack_slots import pack_slots
from lora_moe_jax.training.packing import PackSizes, packed, packs, places
from lora_moe_jax.training.pieces import pieces
from tests.bench.test_serving import small_config

OUTPUT = 5
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]]  # the second takes more than one step


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("small"))
    options = EngineOptions.resolve(
        config,
        dtype="float32",
        max_adapters=1,
        max_rank=2,
        max_requests=2,
        max_length=16,
        page_size=8,
        token_buckets=[8],
        prefill_chunk=None,
        decode_steps=1,
        max_logprobs=0,
        prefix_cache=False,
    )
    model = random_model(config, dtype="float32", adapters=SlotConfig(1, 2, "float32"))
    engine = Engine.from_model(model, None, options)
    _load_adapters(engine, 1)
    return engine


@pytest.fixture(scope="module")
def replay(engine):
    return Replay(engine)


@pytest.fixture(scope="module")
def generated(engine):
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=0)
    with engine.stream(PROMPTS, params, ["0", "0"]) as stream:
        recorded = run_recorded(engine, stream)
    return stream.requests, recorded


def test_sampler_and_trainer_choose_the_same_experts(engine, replay, generated):
    """The trainer's function for the one layer of this model, on a packed batch."""
    requests, _ = generated
    sizes = PackSizes(32, 8, 1)
    data = [Datum(request.tokens, "0") for request in requests]
    (pack,) = packs(checked_rows(data, engine.config.vocab_size, 32, ()), sizes)
    slots = pack_slots(engine.bank, {"0": 0}, sizes.slots)
    batch = packed(pack, sizes, slots.numbers)
    model = engine.arrays.merge(engine.arrays.base, engine.arrays.bank.stacks)
    embedding, layer, _ = pieces(model)
    x, _ = embedding.functions.forward(embedding.arrays(engine.bank, slots), None, batch, sizes)
    experts = np.asarray(layer.functions.choices(layer.arrays(engine.bank, slots), x, batch, sizes))
    for mine, place in zip(replay.choices(*generated), places(pack), strict=True):
        assert not rerouted(mine, experts[None, place]).any()
    assert len(np.unique(experts)) > engine.config.moe.top_k


@pytest.mark.slow
def test_a_whole_trainer(engine, replay, generated):
    requests, _ = generated
    data = [Datum(request.tokens, "0") for request in reversed(requests)]
    of_trainer = trainer_choices(engine, Trainer(engine, token_buckets=[16]), data)
    for request, mine, its in zip(
        requests, replay.choices(*generated), reversed(of_trainer), strict=True
    ):
        assert len(request.tokens) == request.prompt_length + OUTPUT
        assert mine.shape == (1, len(request.tokens) - 1, engine.config.moe.top_k)
        assert not rerouted(mine, its).any()


def test_choices_are_those_of_the_router(engine, replay, generated):
    arrays, config = engine.arrays, engine.config

    @jax.jit
    def route(base, bank, tokens):
        model = arrays.merge(base, bank)
        layer, slots = model.layers[0], jnp.zeros_like(tokens)
        shapes = layer.self_attn.cache_shapes(config)
        cache = single_sequence_cache(shapes, len(tokens), "float32")
        x = model.embed_tokens(tokens, slots)
        attended, _ = layer.self_attn(layer.input_layernorm(x), cache.view.positions, slots, cache)
        return layer.mlp.gate(layer.post_attention_layernorm(x + attended), slots)[0]

    requests, _ = generated
    tokens = jnp.array(requests[1].tokens[:-1])
    expected = route(arrays.base, arrays.bank.stacks, tokens)
    np.testing.assert_array_equal(replay.choices(*generated)[1][0], expected)


def test_other_steps_are_not_taken_for_the_sampler_s(replay, generated):
    requests, recorded = generated
    batches, _ = recorded
    with pytest.raises(ReplayError, match="begin after .* and 0 were in the prefix cache"):
        replay.choices(requests, recorded._replace(batches=batches[1:]))
    with pytest.raises(ReplayError, match=r"tokens of request \d these steps have"):
        replay.choices(requests, recorded._replace(batches=batches[:-1]))
    requests[0].logprobs[2] += 1
    with pytest.raises(ReplayError, match="request 0 sampled .* at position 5"):
        replay.choices(requests, recorded)
    requests[0].logprobs[2] -= 1


def test_what_counts_as_rerouted():
    mine = np.array([[[0, 1], [2, 3], [4, 5]]])
    its = np.array([[[0, 1], [3, 2], [4, 6]]])
    assert rerouted(mine, its).tolist() == [[False, True, True]]
