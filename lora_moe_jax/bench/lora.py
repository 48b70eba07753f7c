"""Section `lora`: what adapters add to a product, over the same product without them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from rich.table import Table

from lora_moe_jax.bench import arrays, roofline
from lora_moe_jax.bench.kernel_cases import LORA_CASES, LoraCase, Target
from lora_moe_jax.bench.products import others
from lora_moe_jax.bench.section import (
    Job,
    microseconds,
    ratio,
    ratio_cell,
    us_cell,
    verdict_cell,
)
from lora_moe_jax.bench.timing import (
    PALLAS,
    Program,
    Timer,
    Timing,
    on_gpu,
    program,
    times_at_places,
)
from pallas_kernels import grouped_lora_matmul
from pallas_kernels.grouped_lora_matmul import differentiable
from pallas_kernels.grouped_lora_matmul.api import choose_backend
from pallas_kernels.moe_mlp.dispatch import dispatch
from pallas_kernels.shapes import DECODE_TOKENS, PREFILL_TOKENS, ExpertShape, ProductShape

PHASES = {"prefill": PREFILL_TOKENS, "decode": DECODE_TOKENS}
SHRINK = "shrink"  # in the name of the shrink's kernels


@dataclasses.dataclass(frozen=True)
class LoraRow:
    """One bank on one product. Ratios ending in `_over_off` are over the product without adapters.

    Attributes:
      roofline_over_off: the same ratio of the roofline times.
      kernel_us: Pallas kernels with adapters on: shrink and expand. off_us: without adapters.
      expand_over_off: the product with the expand inside alone (None where kernels have no times,
        and where rows are laid out in the same program).
      call_over_off: everything the two programs run, gathers and task tables included.
      ragged_dot_over_off, dense_over_off: lax.ragged_dot and a dense product of equal FLOPs.
    """

    shape: str
    phase: str
    rows: int
    case: str
    slots: int
    rank: int
    live: bool
    shared: bool
    gated: bool
    gather: bool
    implementation: str | None
    roofline_us: float
    roofline_over_off: float
    kernel_us: float | None
    off_us: float | None
    over_roofline: float | None
    off_over_roofline: float | None
    expand_over_off: float | None
    expand_verdict: str
    kernel_over_off: float
    must: float | None
    aim: float | None
    verdict: str
    call_over_off: float
    ragged_dot_over_off: float | None
    dense_over_off: float


def jobs(
    shapes: tuple[ExpertShape, ...], timer: Timer, cases: Sequence[LoraCase] = LORA_CASES
) -> Iterator[Job]:
    # What has targets first: all takes long, and a run that is cut short leaves what it has.
    bounded = [case for case in cases if case.bounded]
    free = [case for case in cases if not case.bounded]
    for some in filter(None, (bounded, free)):
        for shape, which, phase in itertools.product(shapes, ("gate_up", "down"), PHASES):
            rows = PHASES[phase] * shape.top_k
            measurement = functools.partial(measure, shape, which, phase, rows, some, timer)
            yield Job(f"{getattr(shape, which).name} {phase}", measurement)


def measure(
    shape: ExpertShape, which: str, phase: str, rows: int, cases: Sequence[LoraCase], timer: Timer
) -> list[LoraRow]:
    """All banks on one product, in one interleaved measurement at each of W's places."""
    product = getattr(shape, which)
    cases = [case for case in cases if which == "gate_up" or not (case.gated or case.gather)]
    x, w = arrays.normal(0, rows, product.k), arrays.weights(1, product)
    programs, floors, bases = {}, {}, {}
    for case in cases:
        inputs = _Inputs(shape, which, case, rows)
        off = f"off{' gated' * case.gated}{' gather' * case.gather}"
        if off not in programs:
            programs[off] = inputs.program(x, w, adapted=False)
            floors[off] = inputs.floor(adapted=False)
        programs[case.name] = inputs.program(x, w, adapted=True)
        floors[case.name], bases[case.name] = inputs.floor(adapted=True), off
    sizes = jnp.asarray(arrays.random_rows(product.groups, rows, 0).group_sizes)
    times = times_at_places(timer, programs, w) | timer(others(x, w, sizes))
    return [
        _row(product, phase, rows, case, times, floors[case.name], bases[case.name], floors)
        for case in cases
    ]


class _Inputs:
    """The arrays of one bank, and the programs on them."""

    def __init__(self, shape: ExpertShape, which: str, case: LoraCase, rows: int):
        self.product: ProductShape = getattr(shape, which)
        self.case, self.rows = case, rows
        self.gate = shape.gate if case.gated else None
        self.shared = dict(
            shared_a=case.shared and which == "gate_up", shared_b=case.shared and which == "down"
        )
        slots = case.slots if case.live else 0
        if case.gather:
            self.choices = arrays.random_choices(
                self.product.groups, rows // shape.top_k, shape.top_k, slots
            )
            self.active = self.choices.active
        else:
            self.sorted = arrays.random_rows(self.product.groups, rows, slots)
            self.active = self.sorted.active

    def program(self, x, w, adapted: bool) -> Program:
        lora = ()
        if adapted:
            lora = arrays.adapters(2, self.product, self.case.slots, self.case.rank, **self.shared)
        if self.case.gather:
            slots = jnp.asarray(self.choices.slots) if adapted else None
            experts = jnp.asarray(self.choices.experts)
            return program(self._run_from_tokens, x[: len(experts)], w, experts, slots, lora)
        row_slots = jnp.asarray(self.sorted.row_slots) if adapted else None
        return program(self._run, x, w, jnp.asarray(self.sorted.group_sizes), row_slots, lora)

    def _run(self, x, w, sizes, row_slots, lora):
        return grouped_lora_matmul(
            x, w, sizes, row_slots, lora, parts=self.product.parts, gate=self.gate
        )

    def _run_from_tokens(self, x, w, experts, slots, lora):
        """As `moe_mlp` does it."""
        parts, count = self.product.parts, self.case.slots
        if slots is None:
            slots, count = jnp.full(len(experts), -1), 0
        backend = choose_backend(None, x, w, lora, parts)
        route, rows, u = dispatch(backend, w.shape[0], count, x, experts, slots, None, lora)
        arrays = rows, w, None, route.tables, lora, u
        return differentiable.grouped_lora_matmul(backend, parts, self.gate, None, *arrays)

    def floor(self, adapted: bool) -> float:
        """Of the product: rows that are laid out are as if they were not."""
        active, product = self.active, self.product
        out_width = product.n // 2 if self.gate is not None else None
        work = roofline.product(product, self.rows, active, out_width)
        if adapted:
            work += roofline.lora(product, self.case.rank, active, **self.shared)
        return work.seconds


def _row(product, phase, rows, case: LoraCase, times, floor, base, floors) -> LoraRow:
    on, off = times[case.name], times[base]
    ragged_dot, gpu = times.get("ragged_dot"), on_gpu()
    work = floor / floors[base]
    # Where rows are laid out, that is in `off`, and with adapters in the shrink's kernel.
    # Nor is there one where the product makes u itself.
    expand = None if case.gather else ratio(_expand(on), off.pallas)
    expand_target = case.expand_target()
    target: Target | None = case.target(phase == "prefill", work)
    kernel = on.pallas / off.pallas
    return LoraRow(
        shape=product.name,
        phase=phase,
        rows=rows,
        case=case.name,
        slots=case.slots,
        rank=case.rank,
        live=case.live,
        shared=case.shared,
        gated=case.gated,
        gather=case.gather,
        implementation=on.implementation if gpu else None,
        roofline_us=1e6 * floor,
        roofline_over_off=work,
        kernel_us=microseconds(on.pallas if gpu else None),
        off_us=microseconds(off.pallas if gpu else None),
        over_roofline=on.pallas / floor if gpu else None,
        off_over_roofline=off.pallas / floors[base] if gpu else None,
        expand_over_off=expand,
        expand_verdict=expand_target.verdict(expand) if gpu and expand_target else "",
        kernel_over_off=kernel,
        must=target and target.must,
        aim=target and target.aim,
        verdict=target.verdict(kernel) if gpu and target else "",
        call_over_off=on.call / off.call,
        ragged_dot_over_off=ratio(ragged_dot and ragged_dot.call, off.pallas),
        dense_over_off=times["dense"].call / off.pallas,
    )


def _expand(on: Timing) -> float | None:
    """The product's own kernels, without those of the shrink; None if there are none of that."""
    if on.kernels and not on.matching(PALLAS, SHRINK):
        return None
    return on.matching(PALLAS, without=SHRINK) or None


def table(rows: list[LoraRow]) -> Table:
    shown = Table(
        "product",
        "adapters",
        "roofline µs",
        "kernel µs",
        "× roofline",
        "expand / off",
        "",
        "shrink + expand / off",
        "must",
        "",
        "roofline / off",
        "call / off",
        title="Products with adapters over the same without; all times from one run",
    )
    previous = None
    for row in rows:
        name = (row.shape, row.phase)
        if name != previous:
            _add_off(shown, row)
        previous = name
        shown.add_row(
            "",
            f"{row.case} (xla)" if row.implementation == "xla" else row.case,
            us_cell(row.roofline_us),
            us_cell(row.kernel_us),
            ratio_cell(row.over_roofline),
            ratio_cell(row.expand_over_off, 3),
            verdict_cell(row.expand_verdict),
            ratio_cell(row.kernel_over_off, 3),
            "" if row.must is None else f"≤ {row.must:.3f}",
            verdict_cell(row.verdict),
            ratio_cell(row.roofline_over_off, 3),
            ratio_cell(row.call_over_off, 3),
        )
    return shown


def _add_off(shown: Table, row: LoraRow) -> None:
    shown.add_section()
    shown.add_row(
        f"{row.shape} {row.phase}, {row.rows} rows",
        f"off (ragged_dot {ratio_cell(row.ragged_dot_over_off, 1)} ×, "
        f"dense {ratio_cell(row.dense_over_off)} ×)",
        us_cell(row.roofline_us / row.roofline_over_off),
        us_cell(row.off_us),
        ratio_cell(row.off_over_roofline),
    )
