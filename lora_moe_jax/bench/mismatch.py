"""`lora-moe-jax bench mismatch`: how far the sampler's logprobs are from the trainer's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from lora_moe_jax.bench.mismatch_row import MismatchRow, table
from lora_moe_jax.bench.report import Report, this_environment
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.models.build import random_model
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.options import EngineOptions, slot_config
from lora_moe_jax.serving.progress import progress_bar
from lora_moe_jax.serving.request import Completion
from lora_moe_jax.serving.sampling_params import SamplingParams
from lora_moe_jax.training import Datum, LoraConfig, Trainer

PAGE = 64
LEARNING_RATE = 1e-2  # of one step, which makes the adapters' B other than zero
NEAR = (0.9, 1.1)  # of the ratio of a token's two probabilities


@dataclasses.dataclass(frozen=True)
class Load:
    """What is sampled: at least `tokens` tokens, by `requests` requests at a time.

    Attributes:
      prompt, output: the longest prompt, and the tokens of each completion.
      adapters: that requests use in turns, each with random parameters.
    """

    tokens: int
    requests: int
    prompt: int
    output: int
    adapters: int

    @property
    def length(self) -> int:
        return self.prompt + self.output


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
    """Samples, scores and trains on the samples, prints the table and writes the rows as JSON."""
    rows: list[MismatchRow] = []
    report = Report(this_environment(), {"mismatch": rows})
    if json_file is not None:
        report.write(json_file)
    rows += measure(name, config, load, rank, dtype)
    if json_file is not None:
        report.write(json_file)
    console.print(table(rows))
    return report


def measure(name: str, config: ModelConfig, load: Load, rank: int, dtype: str) -> list[MismatchRow]:
    """The samplers' logprobs, of `generate` and of `score`, against the trainer's."""
    engine = _engine(config, load, rank, dtype)
    trainer = Trainer(engine, token_buckets=[PAGE * -(-4 * load.length // PAGE)])
    names = [str(number) for number in range(load.adapters)]
    _random_adapters(trainer, names, config, rank)
    found: dict[str, list[np.ndarray]] = {"generate": [], "score": []}
    sampled = 0
    with progress_bar("sampling and training", shown=True) as bar:
        for completions in _samples(engine, config, load, names):
            sequences = [own.prompt_token_ids + own.token_ids for own in completions]
            adapters = [own.adapter for own in completions]
            trained = trainer.forward_backward(list(map(Datum, sequences, adapters))).logprobs
            scored = engine.score(sequences, adapters)
            for own, of_trainer, score in zip(completions, trained, scored, strict=True):
                made = len(own.token_ids)
                of_engine = np.array(own.logprobs, np.float32)
                found["generate"].append(of_engine - of_trainer[-made:])
                found["score"].append(score.logprobs - of_trainer)
            sampled += load.requests * load.output
            bar.update(sampled, load.tokens)
    return [_row(name, config, load, rank, side, parts) for side, parts in found.items()]


def _engine(config: ModelConfig, load: Load, rank: int, dtype: str) -> Engine:
    options = EngineOptions.resolve(
        config,
        dtype=dtype,
        max_adapters=load.adapters,
        max_rank=rank,
        max_requests=load.requests,
        max_length=load.length,
        page_size=PAGE,
        token_buckets=None,
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
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (len(names), PAGE)).tolist()
    trainer.forward_backward(list(map(Datum, tokens, names)))
    trainer.optim_step(names, LEARNING_RATE)


def _samples(
    engine: Engine, config: ModelConfig, load: Load, names: list[str]
) -> Iterator[list[Completion]]:
    """Completions of random prompts of many lengths, until there are enough tokens."""
    rng = np.random.default_rng(1)
    for _ in range(math.ceil(load.tokens / (load.requests * load.output))):
        lengths = rng.integers(1, load.prompt + 1, load.requests)
        prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
        params = [
            SamplingParams(max_tokens=load.output, ignore_eos=True, logprobs=0, seed=int(seed))
            for seed in rng.integers(0, 2**31, load.requests)
        ]
        yield engine.generate(prompts, params, [names[i % len(names)] for i in range(len(prompts))])


def _row(name, config, load: Load, rank: int, side: str, parts: list[np.ndarray]) -> MismatchRow:
    difference = np.concatenate(parts).astype(np.float64)
    ratio = np.exp(difference)
    outside = (ratio < NEAR[0]) | (ratio > NEAR[1])
    return MismatchRow(
        model=name,
        layers=config.num_layers,
        adapters=load.adapters,
        rank=rank,
        sampler=side,
        requests=load.requests,
        tokens=len(difference),
        mean=float(np.abs(difference).mean()),
        largest=float(np.abs(difference).max()),
        differing=float((difference != 0).mean()),
        outside=float(outside.mean()),
    )
