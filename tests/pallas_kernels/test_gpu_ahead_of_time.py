"""ptxas compiles the kernels for the H200 at real models' shapes, without a GPU.

It refuses what the interpreter accepts: layouts that the hardware does not have, too much shared
memory. And it tells of spilled registers and serialized tensor core instructions, which are slow.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.shapes import DECODE_TOKENS, EXPERT_SHAPES, PREFILL_TOKENS
from tests.pallas_kernels.gpu_compile import REPORT, SETTINGS, STAY
from tests.pallas_kernels.ptx import orders_of_norms

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None
    or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="jax-cuda13-plugin and jax-cuda13-pjrt are not installed (aot extra)",
)
CALLS = 78
# What is needed before and after a unit's loop, or a split's. In the loop are a load or two: over
# keys, and over rounds of latents.
MAY_SPILL = {  # bytes
    "latent attention": 128,
    "latent attention of few": 272,
    "attention gradients of queries": 144,
    "attention gradients of queries with sinks": 144,
    "attention gradients of keys": 96,
    "latent attention gradients of queries": 400,
    "latent attention gradients of keys": 192,
}
# Else one.
KERNELS = {
    "attention of few": 2,
    "attention of one token": 2,
    "attention of few tokens": 2,
    "attention of few with sinks": 2,
    "latent attention of few": 2,
    "dense of many tokens": 2,
    "experts of few tokens": 2,
    "route": 0,  # Triton's: one for few rows, one for tiles and one for runs of many
    "general product": 0,
}
# Kernels, or some of them.
OF_TRITON = (
    "route",
    "spread and shrink",
    "general product",
    "routed experts of one token",
    "routed experts of few tokens",
)
# u of 64 ranks at most is made by the product of gate and up, or by one shrink.
KERNELS_OF_MANY_RANKS = KERNELS | {
    "gate_up gated of one token": 2,
    "experts of one token": 0,  # they have kernels of their own
    "routed experts of one token": 4,
    "dense of few tokens": 3,
    "dense of many tokens": 3,
}
SPILL = re.compile(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def compile_all(name, tokens, rank, only=""):
    """What ptxas said, and the report, of each call of `gpu_compile`."""
    command = [sys.executable, "-m", "tests.pallas_kernels.gpu_compile", name]
    run = subprocess.run(
        [*command, str(tokens), str(rank), only],
        cwd=Path(__file__).parents[2],
        env=os.environ | SETTINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    *said, rest = re.split(f"^{REPORT}(.*)$", run.stdout, flags=re.MULTILINE)
    assert not rest.strip()
    reports = list(zip(said[::2], map(json.loads, said[1::2]), strict=True))
    assert len(reports) == (len(only.split(",")) if only else CALLS)
    return reports


def check(reports, kernels=KERNELS):
    for said, report in reports:
        call = report["call"].removesuffix(STAY)
        assert report["kernels"] == kernels.get(call, 1), report
        assert report["triton"] <= (2 if call in OF_TRITON else 0), report
        spills = SPILL.findall(said)
        assert len(spills) == report["kernels"], said
        most = MAY_SPILL.get(call, 0)
        assert all(int(count) <= most for counts in spills for count in counts), (report, said)
        assert "serialized" not in said, (report, said)


def test_decode():
    check(
        compile_all(
            "qwen3-30b-a3b",
            DECODE_TOKENS,
            16,
            "gate_up gated,gate_up float32,shrink,spread,route,"
            "gate_up gated of classes,shrink of classes,"
            "routed experts of one token,normed qkv of one token,normed router of one token,"
            "experts of few tokens,gate_up gated after its shrink,down after its shrink,"
            "dense of few tokens,narrow of few tokens,narrow float32 of rows alone,"
            "layered dense of one token,layered narrow of few tokens,"
            "rotation,rotation without norms,"
            "attention of groups of three,attention of few,attention of few with sinks,"
            "attention of one token,attention of few tokens,"
            "latent attention of few,"
            "attention gradients of queries,attention gradients of queries with sinks,"
            "attention gradients of keys,latent attention gradients of queries,"
            "latent attention gradients of keys,rms_norm,add_norm,"
            "choice,choice of bfloat16,"
            f"latent attention of few{STAY},attention gradients of queries{STAY},"
            f"attention gradients of keys{STAY},latent attention gradients of queries{STAY},"
            f"latent attention gradients of keys{STAY}",
        )
    )


def test_prefill():
    check(
        compile_all(
            "qwen3-30b-a3b",
            PREFILL_TOKENS,
            16,
            "gate_up gated,gate_up backward,dense of many tokens,route,"
            "outer of parts,shrink of parts,shrink of classes,spread and shrink,"
            "shrink and outer,shrink and outer of parts,"
            "attention,attention with sinks,latent attention",
        )
    )


def test_roundings():
    """XLA keeps the rounding of a result, and of routing weights, that is widened right away."""
    calls = "general product,routed experts of few tokens"
    for _, report in compile_all("qwen3-30b-a3b", DECODE_TOKENS, 16, calls):
        assert report["roundings"], report


def test_heads_are_normed_in_one_order(monkeypatch):
    """Else a last bit of what is cached depends on how many tokens a step has."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    calls = "rotation,attention of one token,attention of few tokens"
    found = compile_all("qwen3-30b-a3b", DECODE_TOKENS, 16, calls)
    orders = [orders_of_norms(said) for said, _ in found]
    assert all(orders)
    assert len({order for its in orders for order in its}) == 1


def test_biases():
    """Of gate and up of one token and of a few, and of dense layers whose W is loaded early."""
    calls = (
        "gate_up gated,gate_up gated of one token,experts of one token,layered dense of one token"
    )
    check(compile_all("gpt-oss-20b", DECODE_TOKENS, 16, calls))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PREFILL_TOKENS])
@pytest.mark.parametrize("name", EXPERT_SHAPES)
def test_named_shapes(name, tokens, rank):
    check(compile_all(name, tokens, rank), KERNELS if rank <= 32 else KERNELS_OF_MANY_RANKS)
