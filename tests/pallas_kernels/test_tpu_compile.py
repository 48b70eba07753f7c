"""libtpu compiles the kernels for every TPU generation at real models' shapes, without a TPU.

It refuses what the interpreter accepts: buffers over the VMEM, layouts and copies that the
hardware does not have. Times and numbers need a TPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.shapes import DECODE_TOKENS, EXPERT_SHAPES, PREFILL_TOKENS
from tests.pallas_kernels.tpu_compile import SETTINGS, TOPOLOGIES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (tpu-aot extra)"
)
CALLS = 10


def compile_all(generation, name, tokens, *, dtype="bfloat16", rank=16, slots=8):
    """The reports of `tpu_compile`."""
    command = [sys.executable, "-m", "tests.pallas_kernels.tpu_compile", generation, name]
    command += [str(tokens), dtype, str(rank), str(slots)]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(reports) == CALLS
    assert all(report["kernels"] == 1 for report in reports), reports
    return reports


def test_decode_on_v6e():
    for report in compile_all("v6e", "qwen3-30b-a3b", DECODE_TOKENS):
        # Tables alone: no copy of W, of a bank or of rows.
        assert report["temporary_bytes"] < 2 << 20, report


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PREFILL_TOKENS])
@pytest.mark.parametrize("name", EXPERT_SHAPES)
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_named_shapes(generation, name, tokens):
    compile_all(generation, name, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize(
    "dtype, rank, slots", [("float32", 16, 8), ("bfloat16", 4, 1), ("bfloat16", 128, 64)]
)
def test_ranks_slots_and_float32(generation, dtype, rank, slots):
    compile_all(generation, "qwen3-30b-a3b", PREFILL_TOKENS, dtype=dtype, rank=rank, slots=slots)
    compile_all(generation, "qwen3-30b-a3b", 1, dtype=dtype, rank=rank, slots=slots)
