"""Section `attention`: paged attention alone, against the card's bandwidth and products.

Decode: every request has one token, at the end of its context. Prefill: whole prompts. Gradients:
the backward pass over whole sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from lora_moe_jax.bench import arrays, roofline
from lora_moe_jax.bench.kernel_cases import ATTENTION_CASES, AttentionCase
from lora_moe_jax.bench.section import Job, microseconds, ratio_cell, us_cell, verdict_cell
from lora_moe_jax.bench.timing import Program, Timer, on_gpu, program
from pallas_kernels import PageView, paged_attention, paged_latent_attention
from pallas_kernels.shapes import ExpertShape


@dataclasses.dataclass(frozen=True)
class AttentionRow:
    """Times in µs; None off a GPU. `share` is of the roofline in question, `bound`."""

    case: str
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    page: int
    requests: int
    context: int
    implementation: str | None
    bound: str
    roofline_us: float
    kernel_us: float | None
    call_us: float | None
    tflops: float | None
    terabytes_per_second: float | None
    share: float | None
    must: float
    aim: float
    verdict: str


def jobs(shapes: tuple[ExpertShape, ...], timer: Timer) -> Iterator[Job]:
    for case in ATTENTION_CASES:
        if case.model in shapes:
            yield Job(case.name, lambda case=case: [measure(case, timer)])


def measure(case: AttentionCase, timer: Timer) -> AttentionRow:
    timing = timer({"kernel": _program(case)})["kernel"]
    work, kernel, gpu = case.work, timing.pallas, on_gpu()
    floors = {
        "bandwidth": work.bytes / roofline.ceilings().bytes,
        "products": work.flops / roofline.ceilings().flops,
    }
    share = floors[case.bound] / kernel if gpu else None
    return AttentionRow(
        case=case.name,
        heads=case.heads,
        kv_heads=case.kv_heads,
        key_width=case.key_width,
        value_width=case.value_width,
        page=case.page,
        requests=case.requests,
        context=case.context,
        implementation=timing.implementation if gpu else None,
        bound=case.bound,
        roofline_us=1e6 * work.seconds,
        kernel_us=microseconds(kernel if gpu else None),
        call_us=microseconds(timing.call if gpu else None),
        tflops=work.flops / kernel / 1e12 if gpu else None,
        terabytes_per_second=work.bytes / kernel / 1e12 if gpu else None,
        share=share,
        must=case.must,
        aim=case.aim,
        verdict=_verdict(case, share),
    )


def _verdict(case: AttentionCase, share: float | None) -> str:
    """More is better here."""
    if share is None:
        return ""
    return "aim" if share >= case.aim else "must" if share >= case.must else "MISS"


def _program(case: AttentionCase) -> Program:
    view, pages = _view(case), case.requests * -(-case.context // case.page)
    tokens = view.request.shape[0]

    def cache(seed, width):
        heads = (case.kv_heads,) if case.kv_heads else ()
        return arrays.normal(seed, pages, case.page, *heads, width)

    def queries(seed, width):
        return arrays.normal(seed, tokens, case.heads, width)

    options = dict(scale=case.key_width**-0.5)
    if case.kv_heads:
        options["sliding_window"] = case.window
        options["sinks"] = arrays.normal(3, case.heads) if case.sinks else None
        inputs = queries(0, case.key_width), cache(1, case.key_width), cache(2, case.value_width)

        def attend(q, k, v, view):
            return paged_attention(q, k, v, view, **options)

        if not case.gradients:
            return program(attend, *inputs, view)
        out, backward = jax.vjp(lambda q, k, v: attend(q, k, v, view), *inputs)
        return program(lambda backward, dout: backward(dout), backward, out)
    rope = case.key_width - case.value_width
    inputs = (
        queries(0, case.value_width),
        queries(1, rope),
        cache(2, case.value_width),
        cache(3, rope),
    )
    return program(lambda *arguments: paged_latent_attention(*arguments, **options), *inputs, view)


def _view(case: AttentionCase) -> PageView:
    """Pages lie anywhere in the cache, as after a while of serving."""
    columns = -(-case.context // case.page)
    order = np.random.default_rng(0).permutation(case.requests * columns)
    tables = order.reshape(case.requests, columns).astype(np.int32)
    first = case.context - case.tokens
    request = np.repeat(np.arange(case.requests), case.tokens)
    positions = np.tile(np.arange(first, case.context), case.requests)
    return PageView(*(jnp.asarray(a, jnp.int32) for a in (request, positions, tables)))


def table(rows: list[AttentionRow]) -> Table:
    shown = Table(
        "attention",
        "heads (cache), widths",
        "requests × context",
        "roofline µs",
        "kernel µs",
        "call µs",
        "TFLOP/s",
        "TB/s",
        "share of",
        "",
        "must",
        "aim",
        "",
        title="Paged attention, bfloat16",
    )
    for row in rows:
        shown.add_row(
            row.case,
            f"{row.heads} ({row.kv_heads or 'latent'}), {row.key_width} / {row.value_width}",
            f"{row.requests} × {row.context}",
            us_cell(row.roofline_us),
            us_cell(row.kernel_us),
            us_cell(row.call_us),
            us_cell(row.tflops),
            ratio_cell(row.terabytes_per_second),
            row.bound,
            ratio_cell(row.share),
            f"≥ {row.must:.2g}",
            f"≥ {row.aim:.2g}",
            verdict_cell(row.verdict),
        )
    return shown
