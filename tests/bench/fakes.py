"""Stand-ins for a device: timings that are given, not measured."""

from __future__ import annotations

from collections.abc import Mapping

from lora_moe_jax.bench.timing import Program, Timing
from pallas_kernels.shapes import ExpertShape

TINY = ExpertShape("tiny", 4, 2, 32, 16)


def fake_timer(times: Mapping[str, Timing]):
    """A timer that runs nothing; it must be asked for programs it has times of."""

    def timer(programs: Mapping[str, Program]) -> dict[str, Timing]:
        return {name: times[name] for name in programs}

    return timer


def pallas(microseconds: float, *, shrink: float = 0.0, other: float = 0.0) -> Timing:
    """A program of one product kernel, and maybe a shrink and kernels that XLA made."""
    kernels = {
        "lora_product_k32_mosaic_gpu_kernel": 1e-6 * microseconds,
        "lora_shrink_r16_mosaic_gpu_kernel": 1e-6 * shrink,
        "loop_gather_fusion": 1e-6 * other,
    }
    return Timing(sum(kernels.values()), {name: time for name, time in kernels.items() if time})


def xla(microseconds: float) -> Timing:
    return Timing(1e-6 * microseconds, {"nvjet_gemm": 1e-6 * microseconds})
