"""Section `layer`: a whole MoE layer from given choices, against the fastest of other engines.

One compiled program runs 16 layers, each with inputs, choices and adapters of its own and one of
four sets of weights, so that no cache holds what the next layer reads. Times are elapsed times with
many programs in flight: gaps between launches count.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.table import Table

from lora_moe_jax.bench import arrays, roofline
from lora_moe_jax.bench.kernel_cases import LAYER_SHAPES, LAYER_TOKENS, NO_ADAPTER
from lora_moe_jax.bench.peers import PEERS
from lora_moe_jax.bench.section import Job, microseconds, ratio_cell, us_cell, verdict_cell
from lora_moe_jax.bench.timing import ProgramInPlace, Timer, elapsed_times, on_gpu
from pallas_kernels.shapes import ExpertShape

LAYERS = 16
WEIGHT_SETS = 4
SLOTS, RANK = 8, 32
REQUESTS = 16  # of a prefill batch
DECODE = 256  # up to so many tokens, each is a request of its own


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """µs of one layer; None off a GPU. Peers' times are for adapters on (off).

    Attributes:
      idle_us: with slots, and no row that uses one. Files from before 2026-11-28 do not have it.
    """

    shape: str
    tokens: int
    slots: int
    rank: int
    roofline_us: float
    base_roofline_us: float
    lora_us: float | None
    base_us: float | None
    over_roofline: float | None
    base_over_roofline: float | None
    lora_over_base: float
    peer_us: float | None
    peer_base_us: float | None
    must_us: float | None
    aim_us: float | None
    verdict: str
    idle_us: float | None = None
    idle_over_base: float | None = None
    idle_verdict: str = ""


class Routing(NamedTuple):
    """One layer's choices: experts [T, k], their weights [T, k], and each token's slot [T]."""

    experts: np.ndarray
    weights: np.ndarray
    slots: np.ndarray


class Banks(NamedTuple):
    """One layer's weights and adapters."""

    gate_up: jax.Array
    down: jax.Array
    gate_lora: tuple
    up_lora: tuple
    down_lora: tuple


def jobs(shapes: tuple[ExpertShape, ...], timer: Timer = elapsed_times) -> Iterator[Job]:
    for shape in shapes:
        if shape in LAYER_SHAPES:
            # All sizes of a shape in one job: they share its weights.
            yield Job(shape.name, lambda shape=shape: measure(shape, LAYER_TOKENS, timer))


def measure(
    shape: ExpertShape, sizes: tuple[int, ...], timer: Timer, rank: int = RANK
) -> list[LayerRow]:
    banks = [_banks(i, shape, rank) for i in range(WEIGHT_SETS)]
    return [_measure(shape, tokens, rank, banks, timer) for tokens in sizes]


def _measure(shape, tokens, rank, banks, timer) -> LayerRow:
    peer = PEERS.get((shape.name, tokens))
    layers = comparable_routings(shape, tokens, rank, peer and peer.roofline)
    idle = [layer._replace(slots=np.full_like(layer.slots, -1)) for layer in layers]
    times = timer(
        {
            "lora": _program(shape, tokens, layers, banks),
            "idle": _program(shape, tokens, idle, banks),
            "base": _program(shape, tokens, layers, [_without_adapters(bank) for bank in banks]),
        }
    )
    lora, idle, base = (times[name].call / LAYERS for name in ("lora", "idle", "base"))
    card = roofline.ceilings()
    floor, base_floor = (mean_roofline(shape, layers, r, card) for r in (rank, 0))
    gpu = on_gpu()
    return LayerRow(
        shape=shape.name,
        tokens=tokens,
        slots=SLOTS,
        rank=rank,
        roofline_us=1e6 * floor,
        base_roofline_us=1e6 * base_floor,
        lora_us=microseconds(lora if gpu else None),
        base_us=microseconds(base if gpu else None),
        over_roofline=lora / floor if gpu else None,
        base_over_roofline=base / base_floor if gpu else None,
        lora_over_base=lora / base,
        peer_us=peer and peer.lora,
        peer_base_us=peer and peer.base,
        must_us=peer and peer.target.must,
        aim_us=peer and peer.target.aim,
        # The peers' times are those of an H200.
        verdict=peer.target.verdict(1e6 * lora) if peer and gpu and card == roofline.H200 else "",
        idle_us=microseconds(idle if gpu else None),
        idle_over_base=idle / base,
        idle_verdict=NO_ADAPTER.verdict(idle / base) if gpu else "",
    )


def comparable_routings(
    shape: ExpertShape, tokens: int, rank: int, peer_us: float | None
) -> list[Routing]:
    """Random routings of all layers; the first whose work is that of the peers' within 1 %."""
    for seed in itertools.count():
        rngs = np.random.default_rng([seed, tokens]).spawn(LAYERS)
        layers = [random_routing(shape, tokens, rng) for rng in rngs]
        # Theirs were measured on an H200.
        floor = 1e6 * mean_roofline(shape, layers, rank, roofline.H200)
        if peer_us is None or abs(floor / peer_us - 1) < 0.01:
            return layers


def random_routing(shape: ExpertShape, tokens: int, rng: np.random.Generator) -> Routing:
    """Distinct experts, uniform; a slot for each token, or two requests in a row for each slot."""
    experts = np.argsort(rng.random((tokens, shape.experts)), axis=1)[:, : shape.top_k]
    weights = rng.dirichlet(np.ones(shape.top_k), tokens)
    slots = rng.integers(0, SLOTS, tokens)
    if tokens > DECODE:
        slots = np.repeat(rng.permutation(np.arange(REQUESTS) % SLOTS), tokens // REQUESTS)
    return Routing(experts.astype(np.int32), weights.astype(np.float32), slots.astype(np.int32))


def mean_roofline(
    shape: ExpertShape, layers: list[Routing], rank: int, card: roofline.Ceilings
) -> float:
    """Seconds of one layer; rank 0 is the base alone."""
    return float(np.mean([_work(shape, layer, rank).seconds_of(card) for layer in layers]))


def _work(shape: ExpertShape, layer: Routing, rank: int) -> roofline.Work:
    group, slots = layer.experts.reshape(-1), np.repeat(layer.slots, shape.top_k)
    active = arrays.active_of(group, slots, shape.experts)
    return roofline.layer(shape, len(layer.slots), len(group), active, rank)


def _banks(seed: int, shape: ExpertShape, rank: int) -> Banks:
    seed *= 10
    gate_lora, up_lora = arrays.adapters(seed + 2, shape.gate_up, SLOTS, rank)
    (down_lora,) = arrays.adapters(seed + 6, shape.down, SLOTS, rank)
    gate_up, down = (arrays.weights(seed + i, p) for i, p in enumerate(shape.products))
    return Banks(gate_up, down, gate_lora, up_lora, down_lora)


def _without_adapters(banks: Banks) -> Banks:
    return banks._replace(gate_lora=None, up_lora=None, down_lora=None)


def _program(
    shape: ExpertShape, tokens: int, layers: list[Routing], banks: list[Banks]
) -> ProgramInPlace:
    inputs = [arrays.normal(100 + i, tokens, shape.hidden) for i in range(LAYERS)]
    routings = [jax.tree.map(jnp.asarray, layer) for layer in layers]
    return ProgramInPlace(_layers(shape), inputs, routings, banks)


def _layers(shape: ExpertShape) -> Callable:
    from pallas_kernels.moe_mlp.api import moe_mlp

    @jax.jit  # one trace and one lowering for all layers
    def layer(x, routing: Routing, banks: Banks):
        y = moe_mlp(x, *routing, *banks, gate=shape.gate)
        return y.astype(x.dtype)

    def run(inputs, routings, banks):
        outputs = []
        for i, (x, routing) in enumerate(zip(inputs, routings, strict=True)):
            if outputs:
                # A layer starts when the one before is done, as in a model; nothing is merged.
                x, routing, outputs[-1] = lax.optimization_barrier((x, routing, outputs[-1]))
            outputs.append(layer(x, routing, banks[i % len(banks)]))
        return outputs

    return run


def table(rows: list[LayerRow]) -> Table:
    shown = Table(
        "layer",
        "T",
        "roofline µs (off)",
        "LoRA on µs",
        "off µs",
        "× roofline",
        "off ×",
        "on / off",
        "no adapter / off",
        "",
        "fastest peer µs (off)",
        "must",
        "aim",
        "",
        title=f"Whole MoE layer, {SLOTS} slots; elapsed time of one of {LAYERS} layers",
    )
    for row in rows:
        shown.add_row(
            f"{row.shape}, r {row.rank}",
            str(row.tokens),
            f"{us_cell(row.roofline_us)} ({us_cell(row.base_roofline_us)})",
            us_cell(row.lora_us),
            us_cell(row.base_us),
            ratio_cell(row.over_roofline),
            ratio_cell(row.base_over_roofline),
            ratio_cell(row.lora_over_base),
            ratio_cell(row.idle_over_base, 3),
            verdict_cell(row.idle_verdict),
            f"{us_cell(row.peer_us)} ({us_cell(row.peer_base_us)})",
            "" if row.must_us is None else f"≤ {row.must_us:g}",
            "" if row.aim_us is None else f"≤ {row.aim_us:g}",
            verdict_cell(row.verdict),
        )
    return shown
