"""`lora-moe-jax bench training`: training a named real model of random weights."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console

from lora_moe_jax.bench.report import Report, this_environment
from lora_moe_jax.bench.roofline import ceilings
from lora_moe_jax.bench.section import verdict_of_more
from lora_moe_jax.bench.serving_work import ModelSizes
from lora_moe_jax.bench.timing import on_gpu
from lora_moe_jax.bench.trainer_row import TrainerRow, table
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.named import named_config
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import abstract_model, projections, random_model
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.options import EngineOptions
from lora_moe_jax.serving.progress import progress_bar
from lora_moe_jax.training import Datum, LoraConfig, Trainer

PAGE = 64
ROUNDS = 5
UPDATES = 1000  # new versions, one after the other
PACK = 2  # sequences that pass together; a larger batch adds up gradients
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj"}
ATTENTION |= {"kv_a_proj_with_mqa", "kv_b_proj"}
TARGETS = ("all linear", "attention")
TOKENS_PER_SECOND = ("qwen3-30b-a3b", (15_000, 22_000))  # of the whole model, one adapter
OVER_ONE = (0.93, 0.97)


@dataclasses.dataclass(frozen=True)
class Load:
    """What is measured: sequences of adapters in turns, as one batch."""

    adapters: int
    targets: str
    sequences: int
    length: int


def standard_loads(
    adapters: Sequence[int] | None, sequences: int | None, length: int
) -> list[Load]:
    """A load for each number of adapters; without any, one on everything and one on attention."""
    if adapters is None:
        return [Load(1, targets, sequences or 4, length) for targets in TARGETS]
    return [Load(count, "all linear", max(sequences or 4, count), length) for count in adapters]


def run_training(
    console: Console,
    name: str,
    config: ModelConfig,
    loads: Sequence[Load],
    *,
    rank: int,
    dtype: str = "bfloat16",
    rounds: int = ROUNDS,
    json_file: Path | None = None,
) -> Report:
    """Measures each load on an engine of its own, prints the table and writes the rows as JSON."""
    rows: list[TrainerRow] = []
    report = Report(this_environment(), {"trainer": rows})
    if json_file is not None:
        report.write(json_file)
    for load in loads:
        rows.append(measure(name, config, load, rank, dtype, rounds, rows))
        if json_file is not None:
            report.write(json_file)
    console.print(table(rows))
    return report


def measure(
    name: str, config: ModelConfig, load: Load, rank: int, dtype: str, rounds: int, rows
) -> TrainerRow:
    """One load, on random weights made for it."""
    engine, sizes = _engine(config, load, rank, dtype)
    trainer = Trainer(engine, token_buckets=[min(PACK, load.sequences) * load.length])
    names = [str(number) for number in range(load.adapters)]
    for adapter in names:
        trainer.add_adapter(adapter, LoraConfig(rank))
    times, state = [], 0
    with progress_bar("training", shown=True) as bar:
        for number in range(rounds + 1):
            start = time.perf_counter()
            trainer.forward_backward(_batch(config, load, names, number))
            jax.block_until_ready(jax.live_arrays())
            passed = time.perf_counter()
            state = sum(info.nbytes for info in trainer.adapters())
            trainer.optim_step(names, 1e-4)
            jax.block_until_ready(engine.bank.stacks)
            times.append((passed - start, time.perf_counter() - passed))
            bar.update(number + 1, rounds + 1)
    # The first ones compile.
    seconds = [statistics.median(of_kind) for of_kind in zip(*times[1:], strict=True)]
    update = _update(engine, trainer, names[0], UPDATES)
    return _row(name, sizes, load, rank, seconds, update, state, rows)


class Updates(NamedTuple):
    """New versions of an adapter, one after the other.

    Attributes:
      seconds: the median.
      growth: bytes in use after the last, less those after the first.
    """

    count: int
    seconds: float
    growth: int


def _update(engine: Engine, trainer: Trainer, name: str, count: int) -> Updates:
    times, in_use = [], []
    with progress_bar("updating", shown=True) as bar:
        for number in range(count + 1):
            start = time.perf_counter()
            trainer.update_engine(name)
            jax.block_until_ready(engine.bank.stacks)
            times.append(time.perf_counter() - start)
            if number in (0, count):
                in_use.append(_bytes_in_use())
            bar.update(number, count)
    return Updates(count, statistics.median(times[1:]), in_use[1] - in_use[0])


def _bytes_in_use() -> int:
    """On the device; off a GPU, of arrays."""
    memory = jax.local_devices()[0].memory_stats()
    if memory is not None:
        return memory["bytes_in_use"]
    return sum(array.nbytes for array in jax.live_arrays())


def _engine(config: ModelConfig, load: Load, rank: int, dtype: str) -> tuple[Engine, ModelSizes]:
    """An engine that serves next to nothing: the least to compile and to keep."""
    options = EngineOptions.resolve(
        config,
        dtype=dtype,
        max_adapters=load.adapters,
        max_rank=rank,
        max_requests=1,
        max_length=min(PAGE, config.max_position),
        page_size=PAGE,
        token_buckets=[1],
        prefill_chunk=None,
        decode_steps=1,
    )
    slots = SlotConfig(load.adapters, rank, dtype, _targets(config, load))
    with progress_bar("making weights", shown=True) as bar:
        model = random_model(config, dtype=dtype, adapters=slots, progress=bar.update)
    return Engine.from_model(model, None, options, progress=True), ModelSizes.of(model)


def _targets(config: ModelConfig, load: Load) -> frozenset[str]:
    """The projections that get slots: what "all-linear" means, or of that the attention's."""
    every = projections(abstract_model(config, adapters=SlotConfig(1, 1)))
    linear = {name for name, its in every.items() if its.kind in ("linear", "expert")}
    if load.targets == "all linear":
        return frozenset(linear)
    return frozenset(name for name in linear if name.rpartition(".")[2] in ATTENTION)


def _batch(config: ModelConfig, load: Load, names: list[str], seed: int) -> list[Datum]:
    rng = np.random.default_rng([seed, load.sequences, load.length])
    tokens = rng.integers(0, config.vocab_size, (load.sequences, load.length)).tolist()
    return [Datum(own, names[i % len(names)]) for i, own in enumerate(tokens)]


def _row(
    name, sizes: ModelSizes, load: Load, rank: int, seconds, update: Updates, state: int, rows
) -> TrainerRow:
    one_pass, step = seconds
    tokens = load.sequences * load.length
    flops = sizes.training_flops(load.sequences, load.length)
    speed = tokens / (one_pass + step)
    one = next((row for row in rows if row.adapters == 1 and row.targets == load.targets), None)
    over_one = speed / one.tokens_per_second if one and load.adapters > 1 else None
    value, must, aim = _target(name, sizes, load, speed, over_one)
    return TrainerRow(
        model=name,
        layers=sizes.config.num_layers,
        adapters=load.adapters,
        targets=load.targets,
        rank=rank,
        sequences=load.sequences,
        length=load.length,
        batch_ms=1e3 * one_pass,
        step_ms=1e3 * step,
        update_ms=1e3 * update.seconds,
        updates=update.count,
        update_growth=update.growth,
        tokens_per_second=speed,
        useful_tflop=flops / 1e12,
        tflops=flops / (one_pass + step) / 1e12 if on_gpu() else None,
        share=flops / ceilings().flops / (one_pass + step) if on_gpu() else None,
        peak_gib=_peak_gib(),
        state_gib=state / 2**30,
        over_one=over_one,
        must=must,
        aim=aim,
        verdict=verdict_of_more(value if on_gpu() else None, must, aim),
    )


def _target(name: str, sizes: ModelSizes, load: Load, speed: float, over_one: float | None):
    """The number that a load is held to, with its must and aim; Nones where there is none."""
    model, tokens_per_second = TOKENS_PER_SECOND
    if load.targets != "all linear":
        return None, None, None
    if load.adapters == 8 and over_one is not None:
        return over_one, *OVER_ONE
    if load.adapters == 1 and name == model and sizes.config == named_config(model):
        return speed, *tokens_per_second
    return None, None, None


def _peak_gib() -> float | None:
    statistics_of_memory = jax.local_devices()[0].memory_stats() or {}
    peak = statistics_of_memory.get("peak_bytes_in_use")
    return None if peak is None else peak / 2**30
