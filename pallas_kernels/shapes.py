"""Expert shapes of real models, by name: what tests, ahead-of-time checks and benchmarks run.

Qwen3-30B-A3B, Qwen3-235B-A22B, DeepSeek-V3 (all experts, and the 32 that one of eight
expert-parallel devices holds), DeepSeek-V2-Lite, gpt-oss-20b: their published `config.json`.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.grouped_lora_matmul.gate import Gate


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """One grouped product, `[rows, k] · [groups, n, k]ᵀ`.

    Attributes:
      parts: widths of the output's parts, adding up to n; each part has its own adapters.
    """

    name: str
    groups: int
    k: int
    n: int
    parts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """The routed experts of one layer.

    Attributes:
      experts: experts held by one device.
      top_k: rows of a token on this device (for a slice of the experts: on average).
      gate: the activation between the two products.
      biased: whether gate and up have a bias.
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    gate: Gate = Gate()
    biased: bool = False

    @property
    def gate_up(self) -> ProductShape:
        return ProductShape(
            f"{self.name} gate_up",
            self.experts,
            self.hidden,
            2 * self.intermediate,
            (self.intermediate, self.intermediate),
        )

    @property
    def down(self) -> ProductShape:
        return ProductShape(
            f"{self.name} down", self.experts, self.intermediate, self.hidden, (self.hidden,)
        )

    @property
    def products(self) -> tuple[ProductShape, ProductShape]:
        return self.gate_up, self.down


QWEN3_30B_A3B = ExpertShape("qwen3-30b-a3b", 128, 8, 2048, 768)
QWEN3_235B_A22B = ExpertShape("qwen3-235b-a22b", 128, 8, 4096, 1536)
DEEPSEEK_V3 = ExpertShape("deepseek-v3", 256, 8, 7168, 2048)
DEEPSEEK_V3_EP8 = ExpertShape("deepseek-v3-ep8", 32, 1, 7168, 2048)
DEEPSEEK_V2_LITE = ExpertShape("deepseek-v2-lite", 64, 6, 2048, 1408)
GPT_OSS_20B = ExpertShape("gpt-oss-20b", 32, 4, 2880, 2880, Gate(7.0, 1.702, 1.0), biased=True)

EXPERT_SHAPES: dict[str, ExpertShape] = {
    shape.name: shape
    for shape in (
        QWEN3_30B_A3B,
        QWEN3_235B_A22B,
        DEEPSEEK_V3,
        DEEPSEEK_V3_EP8,
        DEEPSEEK_V2_LITE,
        GPT_OSS_20B,
    )
}
PREFILL_TOKENS = 4096
DECODE_TOKENS = 64
