"""libtpu compiles an engine's functions for every TPU generation, without a TPU.

Layers are one loop, and neither their weights nor the cache are copied.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.pallas_kernels.tpu_compile import TOPOLOGIES, reports_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (aot extra)"
)
MODELS = "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b"
FUNCTIONS = "step", "decode", "score_rows", "filter_rows", "top_rows"
# Less than the experts of all layers on one of four chips, and than the smallest cache.
TEMPORARY = 96 << 20
GRID, ROW = (2, 2), (1, 4)  # chips: experts and features split, features alone


def compile_all(model: str, generation: str, functions=FUNCTIONS, mesh=(1, 1)) -> None:
    arguments = dict(generations=[generation], model=model, only=functions, mesh=mesh)
    reports = reports_of("tests.serving.tpu_steps", **arguments)
    assert [report["function"] for report in reports] == list(functions)
    for report in reports:
        assert report["temporary_bytes"] < TEMPORARY, report


@pytest.mark.parametrize(
    "model, mesh",
    [
        ("deepseek-v2-lite", GRID),
        pytest.param("qwen3-30b-a3b", ROW, marks=pytest.mark.slow),
        pytest.param("gpt-oss-20b", GRID, marks=pytest.mark.slow),
    ],
)
def test_a_step_on_four_chips(model, mesh):
    """Of a chip's down 704 columns, and 192 of its gate and up, are no whole lanes; nor are 64 of a
    head, nor any of gpt-oss's experts."""
    compile_all(model, "v6e", ["step"], mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1), GRID, ROW], ids=str)
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("model", MODELS)
def test_every_function(model, generation, mesh):
    compile_all(model, generation, mesh=mesh)
