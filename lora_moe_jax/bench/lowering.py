"""Section `lowering`: seconds of the host to trace and lower kernels, for the GPU even without one.

On a machine with neither GPU nor TPU, kernels are lowered for an H200; nothing is compiled or run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from rich.table import Table

from lora_moe_jax.bench.arrays import DTYPE
from lora_moe_jax.bench.kernel_cases import LOWERING_SECONDS
from lora_moe_jax.bench.section import Job, ratio_cell, verdict_cell
from lora_moe_jax.bench.timing import Timer
from pallas_kernels import Lora, grouped_lora_matmul
from pallas_kernels.shapes import (
    DECODE_TOKENS,
    PREFILL_TOKENS,
    QWEN3_30B_A3B,
    ExpertShape,
    ProductShape,
)

KERNEL_CALL = re.compile(r"custom_call @(?:mosaic_gpu|tpu_custom_call)")
SLOTS, RANK = 8, 16


@dataclasses.dataclass(frozen=True)
class LoweringRow:
    """`kernels` is how many different Pallas kernels the program has; seconds are for all."""

    shape: str
    rows: int
    program: str
    kernels: int
    trace_s: float
    lower_s: float
    seconds_per_kernel: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Target:
    """What to lower for: a backend by name, and a device that need not be there."""

    implementation: str | None = None
    platforms: tuple[str, ...] | None = None
    device: AbstractDevice | None = None

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Inside, programs are lowered for it, with all their kernels."""
        with contextlib.ExitStack() as stack:
            if jax.__version_info__ >= (0, 11):
                from pallas_kernels.hopper.kept_kernel import nothing_kept

                stack.enter_context(nothing_kept())
            if self.device is not None:
                abstract = AbstractMesh((), (), abstract_device=self.device)
                stack.enter_context(use_abstract_mesh(abstract))
            yield


def default_target() -> Target:
    """This machine's accelerator; an H200 if it has none and JAX can lower for one."""
    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11):
        return Target()
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return Target("mosaic_gpu", ("cuda",), device)


def jobs(shapes: tuple[ExpertShape, ...], timer: Timer | None = None) -> Iterator[Job]:
    del timer  # wall clock, once
    target = default_target()
    yield Job("warm up", lambda: warm_up(QWEN3_30B_A3B.down, target))
    for shape in shapes:
        for product in shape.products:
            for tokens in (PREFILL_TOKENS, DECODE_TOKENS):
                measurement = functools.partial(
                    measure, shape, product, tokens * shape.top_k, target
                )
                yield Job(f"{product.name}, {tokens * shape.top_k} rows", measurement)


def warm_up(product: ProductShape, target: Target) -> list[LoweringRow]:
    """Imports and first uses, which no kernel is to blame for."""
    with target.context():
        _lower(target, grouped_lora_matmul, _arguments(product, 512)[:3])
    return []


def measure(
    shape: ExpertShape, product: ProductShape, rows: int, target: Target
) -> list[LoweringRow]:
    arguments = _arguments(product, rows)
    adapted = functools.partial(grouped_lora_matmul, parts=product.parts)
    programs: dict[str, tuple[Callable, tuple]] = {
        "product": (grouped_lora_matmul, arguments[:3]),
        "with adapters": (adapted, arguments),
        "gradients": (_gradients(adapted), arguments),
    }
    if product == shape.gate_up:
        programs["gated, with adapters"] = (functools.partial(adapted, gate=shape.gate), arguments)
    with target.context():
        return [_row(target, product, rows, name, *program) for name, program in programs.items()]


def _row(
    target: Target, product: ProductShape, rows: int, name: str, function: Callable, arguments
) -> LoweringRow:
    trace, lower, kernels = _lower(target, function, arguments)
    each = (trace + lower) / max(kernels, 1)
    return LoweringRow(
        shape=product.name,
        rows=rows,
        program=name,
        kernels=kernels,
        trace_s=trace,
        lower_s=lower,
        seconds_per_kernel=each,
        verdict=LOWERING_SECONDS.verdict(each) if kernels else "",
    )


def _lower(target: Target, function: Callable, arguments: tuple) -> tuple[float, float, int]:
    """Seconds of tracing and of lowering, and the number of kernels."""

    # A new function each time: JAX keeps the traces of one it knows.
    @jax.jit
    def run(*arguments):
        return function(*arguments, implementation=target.implementation)

    start = time.perf_counter()
    traced = run.trace(*arguments)
    middle = time.perf_counter()
    lowered = traced.lower(lowering_platforms=target.platforms)
    end = time.perf_counter()
    return middle - start, end - middle, len(KERNEL_CALL.findall(lowered.as_text()))


def _gradients(product: Callable) -> Callable:
    def run(x, w, sizes, row_slots, lora, implementation):
        def forward(x, factors):
            banks = tuple(
                Lora(a, b, bank.scaling) for (a, b), bank in zip(factors, lora, strict=True)
            )
            return product(x, w, sizes, row_slots, banks, implementation=implementation)

        y, pullback = jax.vjp(forward, x, [(bank.a, bank.b) for bank in lora])
        return pullback(y)

    return run


def _arguments(product: ProductShape, rows: int) -> tuple:
    def array(*shape, dtype=DTYPE):
        return jax.ShapeDtypeStruct(shape, dtype)

    lora = tuple(
        Lora(
            array(SLOTS, product.groups, RANK, product.k),
            array(SLOTS, product.groups, RANK, width),
            array(SLOTS, 1, dtype=jnp.float32),
        )
        for width in product.parts
    )
    return (
        array(rows, product.k),
        array(product.groups, product.n, product.k),
        array(product.groups, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
        lora,
    )


def table(rows: list[LoweringRow]) -> Table:
    shown = Table(
        "product",
        "rows",
        "program",
        "kernels",
        "trace s",
        "lower s",
        "s a kernel",
        f"≤ {LOWERING_SECONDS.must:g}",
        title="Tracing and lowering",
    )
    for row in rows:
        shown.add_row(
            row.shape,
            str(row.rows),
            row.program,
            str(row.kernels),
            ratio_cell(row.trace_s),
            ratio_cell(row.lower_s),
            ratio_cell(row.seconds_per_kernel),
            verdict_cell(row.verdict),
        )
    return shown
