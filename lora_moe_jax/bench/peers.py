"""The fastest MoE-LoRA layer of other engines on one H200, in µs, and what ours has to reach.

Measured 2026-11-20 (driver 580.159.04) as the fastest of SGLang 0.5.23 (default, virtual experts,
new engine with Triton and with CuTe DSL) and vLLM 0.33: a whole layer, per-expert adapters, 8 slots
of rank 32, CUDA graphs over layers with different inputs, routings and adapters, PyTorch 2.11.
"""

from __future__ import annotations

from typing import NamedTuple

from lora_moe_jax.bench.kernel_cases import Target


class Peer(NamedTuple):
    """µs of one layer: the roofline of the peers' routings, LoRA on, off, and our bounds for on."""

    roofline: float
    lora: float
    base: float
    target: Target


# (shape, tokens)
PEERS: dict[tuple[str, int], Peer] = {
    ("qwen3-30b-a3b", 1): Peer(18.6, 39.1, 28.2, Target(39, 28)),
    ("qwen3-30b-a3b", 8): Peer(118.7, 142.0, 124.9, Target(142, 125)),
    ("qwen3-30b-a3b", 32): Peer(280.1, 297.9, 263.2, Target(298, 282)),
    ("qwen3-30b-a3b", 64): Peer(326.1, 352.5, 293.8, Target(353, 330)),
    ("qwen3-30b-a3b", 256): Peer(394.2, 460.3, 322.5, Target(450, 400)),
    ("qwen3-30b-a3b", 1024): Peer(414.6, 638.1, 380.2, Target(560, 460)),
    ("qwen3-30b-a3b", 4096): Peer(429.2, 1202.0, 845.9, Target(950, 700)),
    ("deepseek-v3-ep8", 1): Peer(20.9, 51.8, 34.8, Target(52, 32)),
    ("deepseek-v3-ep8", 8): Peer(151.9, 185.9, 164.5, Target(186, 160)),
    ("deepseek-v3-ep8", 32): Peer(435.3, 463.7, 425.4, Target(464, 435)),
    ("deepseek-v3-ep8", 64): Peer(597.3, 618.7, 572.1, Target(619, 590)),
    ("deepseek-v3-ep8", 256): Peer(724.7, 754.8, 659.1, Target(755, 710)),
    ("deepseek-v3-ep8", 1024): Peer(767.2, 944.7, 677.0, Target(880, 780)),
    ("deepseek-v3-ep8", 4096): Peer(792.0, 1371.8, 1067.6, Target(1150, 950)),
}
