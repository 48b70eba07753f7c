"""`bench mismatch`: how far the sampler's logprobs and experts are from the trainer's."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console

from lora_moe_jax.bench.mismatch_row import MismatchRow, table
from lora_moe_jax.bench.report import Report, this_environment
from lora_moe_jax.bench.routing import (
    Recorded,
    Replay,
    rerouted,
    run_recorded,
    trainer_choices,
)
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.errors import ConfigError
from lora_moe_jax.models.build import random_model
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.options import EngineOptions, default_buckets, slot_config
from lora_moe_jax.serving.progress import progress_bar
from lora_moe_jax.serving.request import Request, scores
from lora_moe_jax.serving.sampling_params import SamplingParams
from lora_moe_jax.serving.sizes import MORE_MEMORY
from lora_moe_jax.training import Datum, LoraConfig, Trainer

PAGE = 64
LEARNING_RATE = 1e-2  # of one step, which makes the adapters' B other than zero
COMPLETIONS = 4  # of each prompt, of which most find it in the prefix cache
NEAR = (0.9, 1.1)  # of the ratio of a token's two probabilities


@dataclasses.dataclass(frozen=True)
class Load:
    """What is sampled: at least `tokens` tokens.

    Attributes:
      requests: at a time, in turns: few tokens have kernels of their own.
      prompt, output: the longest prompt, and the tokens of each completion.
      adapters: that prompts use in turns, each with random parameters.
    """

    tokens: int
    requests: tuple[int, ...]
    prompt: int
    output: int
    adapters: int

    @property
    def length(self) -> int:
        return self.prompt + self.output

    @property
    def rounds(self) -> int:
        """Of all numbers of requests."""
        return math.ceil(self.tokens / (sum(self.requests) * self.output))


def run_mismatch(
    console: Console,
    name: str,
    config: ModelConfig,
    load: Load,
    *,
    rank: int,
    dtype: str = "bfloat16",
    json_file: Path | None = None,
) -> Report:
    """Samples, scores and trains on the samples, prints the table and writes the rows as JSON.

    Raises:
      ConfigError: the memory of the device is too small.
    """
    rows: list[MismatchRow] = []
    report = Report(this_environment(), {"mismatch": rows})
    if json_file is not None:
        report.write(json_file)
    try:
        rows += measure(name, config, load, rank, dtype)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            "the engine and its trainer do not fit into the memory of the device",
            found=str(error).splitlines()[0],
            hint=f"lower --requests, --prompt, --output, --adapters or --rank; {MORE_MEMORY}",
        ) from error
    if json_file is not None:
        report.write(json_file)
    console.print(table(rows))
    return report


class Sampled(NamedTuple):
    """What the engine did for some sequences, and the logprobs it gave: of each the last ones."""

    requests: Sequence[Request]
    logprobs: list[np.ndarray]
    recorded: Recorded


class Found(NamedTuple):
    """Part by part: differences of logprobs, and which (layer, token) pairs went elsewhere.

    `cached` tokens of prompts were not computed for them, but found in the prefix cache.
    """

    logprobs: list[np.ndarray]
    rerouted: list[np.ndarray]
    cached: list[int]


def measure(name: str, config: ModelConfig, load: Load, rank: int, dtype: str) -> list[MismatchRow]:
    """The samplers' logprobs and experts, of `generate` and of `score`, against the trainer's."""
    engine = _engine(config, load, rank, dtype)
    trainer = Trainer(engine, token_buckets=[PAGE * -(-4 * load.length // PAGE)], progress=True)
    names = [str(number) for number in range(load.adapters)]
    _random_adapters(trainer, names, config, rank)
    replay = Replay(engine) if _has_routers(config) else None
    kinds = itertools.product(load.requests, ("generate", "score"))
    found = {kind: Found([], [], []) for kind in kinds}
    sampled = 0
    with progress_bar("sampling and training", shown=True) as bar:
        for generated in _samples(engine, config, load, names):
            count = len(generated.requests)
            data = [Datum(request.tokens, request.adapter_name) for request in generated.requests]
            logprobs = trainer.forward_backward(data).logprobs
            choices = trainer_choices(engine, trainer, data) if replay else None
            for side, its in (("generate", generated), ("score", _scored(engine, data))):
                of_kind = found[count, side]
                compared = [len(own) for own in its.logprobs]
                of_kind.cached.append(its.recorded.cached)
                for own, other, last in zip(its.logprobs, logprobs, compared, strict=True):
                    of_kind.logprobs.append(own - other[-last:])
                if replay is None:
                    continue
                experts = replay.choices(its.requests, its.recorded)
                for own, other, last in zip(experts, choices, compared, strict=True):
                    of_kind.rerouted.append(rerouted(own[:, -last:], other[:, -last:]))
            sampled += count * load.output
            bar.update(sampled, load.tokens)
    return [_row(name, config, load, rank, *kind, its) for kind, its in found.items()]


def _has_routers(config: ModelConfig) -> bool:
    return any(config.is_sparse(layer) for layer in range(config.num_layers))


def _engine(config: ModelConfig, load: Load, rank: int, dtype: str) -> Engine:
    most = max(load.requests)
    options = EngineOptions.resolve(
        config,
        dtype=dtype,
        max_adapters=load.adapters,
        max_rank=rank,
        max_requests=most,
        max_length=load.length,
        page_size=PAGE,
        token_buckets=[*load.requests, *default_buckets(most, load.length)],
        prefill_chunk=None,
        decode_steps=1,
    )
    slots = slot_config(config, options, None, False)
    with progress_bar("making weights", shown=True) as bar:
        model = random_model(config, dtype=dtype, adapters=slots, progress=bar.update)
    return Engine.from_model(model, None, options, progress=True)


def _random_adapters(trainer: Trainer, names: list[str], config: ModelConfig, rank: int) -> None:
    """Adapters whose both factors are random: after a step on random tokens."""
    for number, name in enumerate(names):
        trainer.add_adapter(name, LoraConfig(rank, seed=number))
    shape = len(names), min(PAGE, config.max_position)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).tolist()
    trainer.forward_backward(list(map(Datum, tokens, names)))
    trainer.optim_step(names, LEARNING_RATE)


def _samples(
    engine: Engine, config: ModelConfig, load: Load, names: list[str]
) -> Iterator[Sampled]:
    """Completions of random prompts of many lengths, until there are enough tokens."""
    rng, turns = np.random.default_rng(1), itertools.cycle(names)
    for requests in load.requests * load.rounds:
        count = max(math.ceil(requests / COMPLETIONS), min(len(names), requests))
        lengths = rng.integers(1, load.prompt + 1, count)
        prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
        # Not next to each other: a prompt is in the cache once it has been computed.
        places = [i % len(prompts) for i in range(requests)]
        params = [
            SamplingParams(max_tokens=load.output, ignore_eos=True, logprobs=0, seed=int(seed))
            for seed in rng.integers(0, 2**31, requests)
        ]
        of_prompt = list(itertools.islice(turns, count))
        adapters = [of_prompt[place] for place in places]
        engine.sleep()  # empties the prefix cache, whose pages `Replay` has written again
        engine.wake()
        with engine.stream([prompts[place] for place in places], params, adapters) as stream:
            recorded = run_recorded(engine, stream)
        logprobs = [np.array(request.logprobs, np.float32) for request in stream.requests]
        yield Sampled(stream.requests, logprobs, recorded)


def _scored(engine: Engine, data: Sequence[Datum]) -> Sampled:
    sequences, adapters = [datum.tokens for datum in data], [datum.adapter for datum in data]
    with engine._open_scores(sequences, adapters, False, 0, 0) as stream:
        recorded = run_recorded(engine, stream)
    return Sampled(stream.requests, [own.logprobs for own in scores(stream.requests)], recorded)


def _row(
    name, config, load: Load, rank: int, requests: int, side: str, found: Found
) -> MismatchRow:
    difference = np.concatenate(found.logprobs).astype(np.float64)
    ratio = np.exp(difference)
    outside = (ratio < NEAR[0]) | (ratio > NEAR[1])
    return MismatchRow(
        model=name,
        layers=config.num_layers,
        adapters=load.adapters,
        rank=rank,
        sampler=side,
        requests=requests,
        tokens=len(difference),
        cached=sum(found.cached),
        mean=float(np.abs(difference).mean()),
        largest=float(np.abs(difference).max()),
        differing=float((difference != 0).mean()),
        outside=float(outside.mean()),
        rerouted=float(np.concatenate(found.rerouted, axis=1).mean()) if found.rerouted else None,
    )
