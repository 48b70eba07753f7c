"""libtpu compiles an engine's functions for every TPU generation, without a TPU.

Layers are one loop, and neither their weights nor the cache are copied.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pallas_kernels.tpu_compile import SETTINGS, TOPOLOGIES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (aot extra)"
)
# Temporary bytes, less than one layer's experts and the smallest cache. DeepSeek-V2-Lite's first
# layer has 10944 columns, no whole lanes: XLA turns `down` around, 45 MB, which `decode` has twice.
MODELS = {"qwen3-30b-a3b": 64 << 20, "deepseek-v2-lite": 140 << 20}
FUNCTIONS = "step", "decode", "score_rows", "filter_rows", "top_rows"


def compile_all(model: str, generation: str, functions) -> None:
    arguments = dict(generations=[generation], model=model, only=functions)
    run = subprocess.run(
        [sys.executable, "-m", "tests.serving.tpu_steps", json.dumps(arguments)],
        cwd=Path(__file__).parents[2],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    reports = {report["function"]: report for report in map(json.loads, run.stdout.splitlines())}
    assert list(reports) == list(functions)
    for report in reports.values():
        assert report["temporary_bytes"] < MODELS[model], report


def test_a_step():
    compile_all("deepseek-v2-lite", "v6e", ["step"])


@pytest.mark.slow
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("model", MODELS)
def test_every_function_on_every_generation(model, generation):
    compile_all(model, generation, FUNCTIONS)
