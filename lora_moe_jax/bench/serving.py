"""`bench serving`: prefill and decode of a whole model of a real size, with and without adapters.

Weights are random and made on the device, so that nothing is downloaded. Every time is that of the
engine's own steps: scheduling, launches, sampling and reading tokens count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from lora_moe_jax.adapters import Adapter, AdapterConfig, LoraPair
from lora_moe_jax.bench.report import Report, this_environment
from lora_moe_jax.bench.section import verdict_of_more
from lora_moe_jax.bench.serving_row import ServingRow, table
from lora_moe_jax.bench.serving_work import ModelSizes
from lora_moe_jax.bench.timing import on_gpu
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.errors import RequestError
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import random_model
from lora_moe_jax.parallel.mesh import mesh_of
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.options import EngineOptions
from lora_moe_jax.serving.progress import progress_bar
from lora_moe_jax.serving.sampling_params import SamplingParams
from lora_moe_jax.serving.stream import RequestStream

PAGE = 64  # positions of a cache page
BASE_SHARE = (0.60, 0.75)  # of the roofline, without adapters: must, aim
ONE_ADAPTER = (0.92, 0.95)  # of the speed without adapters
PREFILL_ADAPTER = (0.92, 0.96)
MIXED = (0.90, 0.95)  # of the ratio of the rooflines


@dataclasses.dataclass(frozen=True)
class Load:
    """What is measured: `adapters` of the engine's are used in turns, 0: none."""

    phase: str
    requests: int
    context: int
    adapters: int


def standard_loads(
    requests: Sequence[int], context: int, prefill: int, adapters: Sequence[int]
) -> list[Load]:
    """Decode of each number of requests and prefill of one, without adapters and with each.

    Each load once: a second time its prompts would be in the prefix cache.
    """
    loads = [
        load
        for used in (0, *adapters)
        for load in (
            *(Load("decode", count, context, used) for count in requests),
            Load("prefill", 1, prefill, used),
        )
    ]
    return list(dict.fromkeys(loads))


def run_serving(
    console: Console,
    name: str,
    config: ModelConfig,
    loads: Sequence[Load],
    *,
    rank: int,
    shared_outer: bool = False,
    dtype: str = "bfloat16",
    output: int = 64,
    decode_steps: int = 1,
    mesh_sizes: Mapping[str, int] | None = None,
    json_file: Path | None = None,
) -> Report:
    """Measures the loads on one engine, prints the table and writes the rows as JSON.

    Rooflines of a mesh are those of devices that share all of a step's work.
    """
    rows: list[ServingRow] = []
    report = Report(this_environment(), {"serving": rows})
    if json_file is not None:
        report.write(json_file)
    engine, sizes = build_engine(
        config, loads, rank, shared_outer, dtype, output, decode_steps, mesh_sizes
    )
    if decode_steps > 1:
        name = f"{name}, {decode_steps} steps at once"
    devices = math.prod((mesh_sizes or {}).values())
    if mesh_sizes is not None:
        name += ", " + " × ".join(f"{axis} {size}" for axis, size in mesh_sizes.items())
    # Without adapters first: the others are compared with it.
    for load in sorted(loads, key=lambda load: load.adapters):
        times = measure(engine, load, output)
        rows.append(_row(name, sizes, load, rank, shared_outer, output, times, rows, devices))
        if json_file is not None:
            report.write(json_file)
    console.print(table(rows))
    return report


def build_engine(
    config: ModelConfig,
    loads,
    rank: int,
    shared_outer: bool,
    dtype: str,
    output: int,
    decode_steps: int = 1,
    mesh_sizes: Mapping[str, int] | None = None,
) -> tuple[Engine, ModelSizes]:
    """An engine of random weights whose steps and cache fit the loads, with its adapters loaded."""
    slots = max(load.adapters for load in loads)
    requests = max(load.requests for load in loads)
    prompt = max(load.context for load in loads)
    buckets = {load.requests for load in loads} | {min(prompt, 4096)}
    options = EngineOptions.resolve(
        config,
        dtype=dtype,
        max_adapters=slots,
        max_rank=rank,
        max_requests=requests,
        max_length=min(prompt + output, config.max_position),
        page_size=PAGE,
        token_buckets=sorted(buckets),
        prefill_chunk=None,
        decode_steps=decode_steps,
        cache_tokens=max(load.requests * (load.context + output + PAGE) for load in loads),
    )
    adapters = SlotConfig(slots, rank, dtype, shared_outer=shared_outer) if slots else None
    mesh = mesh_of(mesh_sizes)
    with progress_bar("making weights", shown=True) as bar:
        model = random_model(config, dtype=dtype, adapters=adapters, mesh=mesh, progress=bar.update)
    sizes = ModelSizes.of(model)
    engine = Engine.from_model(model, None, options, mesh=mesh, progress=True)
    _load_adapters(engine, slots)
    return engine, sizes


def _load_adapters(engine: Engine, count: int) -> None:
    """All hold the same random numbers: each has a slot of its own all the same."""
    if not count:
        return
    pairs = {}
    for name, projection in engine.bank.projections.items():
        slot = engine.bank.like(name)
        rank, groups = slot.a.shape[1], projection.groups if projection.kind == "expert" else 1
        # kv_b's B lies in two parts, by head.
        b_groups = slot.b.shape[0] if hasattr(slot, "b") else 1
        shapes = (slot.a.shape[0], projection.in_features), (b_groups, projection.out_features)
        a, b = (_random_factor((g, rank, width), slot.a.dtype) for g, width in shapes)
        ones = np.ones(groups)
        pairs[name] = LoraPair(a, b, ones.astype(np.float32), (rank * ones).astype(np.int32))
    adapter = Adapter(pairs, "stacked", AdapterConfig(r=engine.options.max_rank, target_modules=()))
    for number in range(count):
        engine.load_adapter(str(number), adapter)


@functools.cache
def _random_factor(shape: tuple[int, ...], dtype) -> np.ndarray:
    """The same for all projections of a shape: a whole adapter has 10⁹ numbers."""
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return (shape[-1] ** -0.5 * values).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of every step measured, and what the host did not wait in each."""

    steps: list[float]
    host: list[float]


def measure(engine: Engine, load: Load, output: int) -> Times:
    """Steps of a load: all decode steps in which every request runs, or three whole prefills."""
    if load.phase == "decode":
        return _decode(engine, load, output)
    runs = [_prefill(engine, _prompts(engine, load, seed), _names(load)) for seed in range(4)]
    # The first one warms up.
    return Times(*map(list, zip(*runs[1:], strict=True)))


def _prompts(engine: Engine, load: Load, seed: int) -> list[list[int]]:
    """Random tokens: no two prompts begin alike."""
    rng = np.random.default_rng([seed, load.requests, load.context, load.adapters])
    shape = load.requests, load.context
    return rng.integers(0, engine.config.vocab_size, shape).tolist()


def _names(load: Load) -> list[str | None]:
    """The adapter of each request."""
    return [str(i % load.adapters) if load.adapters else None for i in range(load.requests)]


def decoding(engine: Engine, load: Load, output: int) -> RequestStream:
    """The stream of a load's requests, each of so many tokens."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return engine.stream(_prompts(engine, load, 0), params, _names(load))


def _prefill(engine: Engine, prompts, names) -> tuple[float, float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    steps = engine._runner.steps
    start, waited = time.perf_counter(), steps.waited
    engine.generate(prompts, params, names)
    seconds = time.perf_counter() - start
    return seconds, seconds - (steps.waited - waited)


def _decode(engine: Engine, load: Load, output: int) -> Times:
    runner, begun, seen, moments = engine._runner, set(), 0, []
    stream = decoding(engine, load, output)
    for delta in stream:
        if runner.counts["steps"] != seen:
            seen = runner.counts["steps"]
            if len(begun) == load.requests:
                moments.append((time.perf_counter(), runner.steps.waited, seen))
        begun.add(delta.index)
        if delta.completion is not None:
            break
    stream.close()
    if len(moments) < 2:
        raise RequestError(
            "the first request ended before all of them were decoding",
            key="--output",
            expected="more tokens than the prompts of all requests take steps",
            found=str(output),
            hint="raise --output, or lower --context or --decode",
        )
    times, waited, steps = np.diff(np.array(moments), axis=0).T
    return Times((times / steps).tolist(), ((times - waited) / steps).tolist())


def _row(
    name, sizes, load, rank, shared_outer, output, times: Times, rows, devices: int = 1
) -> ServingRow:
    decode = load.phase == "decode"
    tokens, context = (1, load.context + output // 2) if decode else (load.context, load.context)
    floors = [
        1e3 * sizes.step(load.requests, tokens, context, adapters).seconds / devices
        for adapters in (load.adapters, 0)
    ]
    step = 1e3 * statistics.median(times.steps)
    base = _base_of(load, rows)
    over_base = base and base.step_ms / step
    over_bytes = over_base and over_base * floors[0] / floors[1]
    share = floors[0] / step
    value, (must, aim) = _target(load, share, over_base, over_bytes)
    if devices > 1:
        value, must, aim = None, None, None  # they are of one device
    between = [1e3 * float(np.percentile(times.steps, q)) for q in (50, 90, 99)]
    return ServingRow(
        model=name,
        phase=load.phase,
        requests=load.requests,
        context=load.context,
        adapters=load.adapters,
        rank=rank,
        shared_outer=shared_outer,
        step_ms=step,
        tokens_per_second=1e3 * load.requests * tokens / step,
        **dict(zip(("p50_ms", "p90_ms", "p99_ms"), between if decode else [None] * 3, strict=True)),
        host_ms=1e3 * statistics.median(times.host),
        roofline_ms=floors[0],
        share=share,
        over_base=over_base,
        over_bytes=over_bytes,
        must=must,
        aim=aim,
        verdict=verdict_of_more(value if on_gpu() else None, must, aim),
    )


def _base_of(load: Load, rows: list[ServingRow]) -> ServingRow | None:
    same = [
        row
        for row in rows
        if (row.phase, row.requests, row.context) == (load.phase, load.requests, load.context)
    ]
    return next((row for row in same if row.adapters == 0), None) if load.adapters else None


def _target(load: Load, share, over_base, over_bytes):
    """The number that a load is held to, with its must and aim; Nones where there is none."""
    if load.adapters == 0 and load.phase == "decode":
        return share, BASE_SHARE
    if load.adapters == 1:
        return over_base, ONE_ADAPTER if load.phase == "decode" else PREFILL_ADAPTER
    if load.adapters > 1 and load.phase == "decode":
        return over_bytes, MIXED
    return None, (None, None)
