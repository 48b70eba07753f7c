"""libtpu compiles the kernels for every TPU generation at real models' shapes, without a TPU.

It refuses what the interpreter accepts: buffers over the VMEM, layouts and copies that the
hardware does not have. Times and numbers need a TPU.
"""

from __future__ import annotations

import importlib.util

import pytest

from pallas_kernels.shapes import DECODE_TOKENS, EXPERT_SHAPES, PREFILL_TOKENS
from tests.pallas_kernels.tpu_compile import TOPOLOGIES, reports_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (aot extra)"
)
KERNELS = {
    "layer, per expert": 4,
    "gradients, per expert": 22,
    "layer, shared outer": 5,
    "gradients, shared outer": 23,
    "layer, no adapters": 2,
    "gradients, no adapters": 4,
}  # of whole layers; all other calls are one
CALLS = 10


def compile_all(generations, name, **options):
    """The reports of `tpu_compile`."""
    module = "tests.pallas_kernels.tpu_compile"
    reports = reports_of(module, generations=generations, name=name, **options)
    calls = options.get("only")
    assert len(reports) == len(generations) * (len(calls) if calls else CALLS)
    for report in reports:
        assert report["kernels"] == KERNELS.get(report["call"], 1), report
    return reports


def test_one_layer_on_every_generation():
    """Every kernel; one process, as most of the time goes to importing and to a first compile."""
    calls = ["layer, shared outer", "outer"]
    for report in compile_all(list(TOPOLOGIES), "deepseek-v3-ep8", only=calls):
        # Tables and rows alone: no copy of W or of a bank.
        assert report["temporary_bytes"] < 8 << 20, report


RANK_CLASSES = [(8, 6), (64, 2)]


@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PREFILL_TOKENS])
def test_rank_classes(tokens):
    """On the generation with least VMEM, the kernels that have all classes at once."""
    calls = ["gate_up gated", "shrink"]
    sizes = dict(tokens=tokens, classes=RANK_CLASSES, only=calls)
    for report in compile_all(["tpu7x"], "qwen3-30b-a3b", **sizes):
        assert report["temporary_bytes"] < 2 << 20 or tokens == PREFILL_TOKENS, report


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PREFILL_TOKENS])
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_rank_classes_on_every_generation(generation, tokens):
    compile_all([generation], "qwen3-30b-a3b", tokens=tokens, classes=RANK_CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PREFILL_TOKENS])
@pytest.mark.parametrize("name", EXPERT_SHAPES)
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_named_shapes(generation, name, tokens):
    reports = compile_all([generation], name, tokens=tokens)
    if tokens == DECODE_TOKENS and name != "gpt-oss-20b":  # whose factors are padded: 2880 columns
        for report in reports:
            assert report["temporary_bytes"] < 2 << 20, report


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PREFILL_TOKENS])
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_whole_layers(generation, tokens):
    compile_all([generation], "qwen3-30b-a3b", tokens=tokens, only=list(KERNELS))


@pytest.mark.slow
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize(
    "dtype, rank, slots", [("float32", 16, 8), ("bfloat16", 4, 1), ("bfloat16", 128, 64)]
)
def test_ranks_slots_and_float32(generation, dtype, rank, slots):
    for tokens in (PREFILL_TOKENS, 1):
        sizes = dict(tokens=tokens, dtype=dtype, classes=[(rank, slots)])
        compile_all([generation], "qwen3-30b-a3b", **sizes)
