"""The cases of `bench kernels`, with what each must reach and what it aims at."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from lora_moe_jax.bench.roofline import ITEM, Work
from pallas_kernels.shapes import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DEEPSEEK_V3_EP8,
    EXPERT_SHAPES,
    GPT_OSS_20B,
    QWEN3_30B_A3B,
    ExpertShape,
    ProductShape,
)


class Target(NamedTuple):
    """What a number must not exceed, and what it should not."""

    must: float
    aim: float

    def verdict(self, value: float | None) -> str:
        if value is None:
            return ""
        return "aim" if value <= self.aim else "must" if value <= self.must else "MISS"


@dataclasses.dataclass(frozen=True)
class ProductCase:
    """A base product; `target` bounds its time over the roofline time."""

    name: str
    shape: ProductShape
    rows: int
    target: Target


_SLICE = DEEPSEEK_V3_EP8.gate_up
PRODUCT_CASES: tuple[ProductCase, ...] = (
    ProductCase("gate/up prefill", QWEN3_30B_A3B.gate_up, 32768, Target(1.45, 1.15)),
    ProductCase("down prefill", QWEN3_30B_A3B.down, 32768, Target(1.45, 1.2)),
    ProductCase("gate/up decode", QWEN3_30B_A3B.gate_up, 512, Target(1.03, 0.95)),
    ProductCase("down decode", QWEN3_30B_A3B.down, 512, Target(1.05, 0.97)),
    ProductCase("gate/up of a slice", _SLICE, 4096, Target(1.15, 1.05)),
    ProductCase("gate/up of a slice, prefill", _SLICE, 32768, Target(1.15, 1.08)),
    ProductCase("gate/up of a slice, decode", _SLICE, 128, Target(1.02, 0.95)),
)


NO_ADAPTER = Target(1.005, 1.005)  # of slots that no row uses, over none


@dataclasses.dataclass(frozen=True)
class LoraCase:
    """A bank, and what runs on it.

    Attributes:
      slots: slots of the bank.
      live: whether rows use them; else no row of the batch has an adapter.
      shared: shared-outer: A of gate and up, and B of down, are one for all experts.
      gated: the activation is in the epilogue of gate/up.
      gather: rows are laid out from tokens in the same program, as a layer does it.
    """

    slots: int
    rank: int = 16
    live: bool = True
    shared: bool = False
    gated: bool = False
    gather: bool = False

    @property
    def name(self) -> str:
        words = [f"{self.slots} slot{'s' * (self.slots > 1)}", f"r {self.rank}"]
        words += ["no adapter in the batch"] * (not self.live)
        words += [word for word in ("shared", "gated", "gather") if getattr(self, word)]
        return ", ".join(words)

    @property
    def bounded(self) -> bool:
        """Whether there are targets for it, at prefill at least."""
        return self.target(prefill=True, work=1.0) is not None

    def expand_target(self) -> Target | None:
        """Bounds the product with the expand inside over the product alone."""
        if not self.live:
            return NO_ADAPTER
        return Target(1.06, 1.03) if self._mixed else None

    def target(self, prefill: bool, work: float) -> Target | None:
        """Bounds shrink and expand over the product alone; `work` is the roofline's own ratio."""
        if not self.live:
            return NO_ADAPTER
        if self._mixed:
            return Target(1.15, 1.06) if prefill else Target(1.05 * work, work)
        if self.slots == 1 and prefill:
            return Target(1.08, 1.03)
        return None

    @property
    def _mixed(self) -> bool:
        return (self.slots, self.rank, self.shared) == (8, 16, False)


LORA_CASES: tuple[LoraCase, ...] = (
    LoraCase(8, live=False),
    LoraCase(1),
    LoraCase(8),
    LoraCase(64),
    LoraCase(8, rank=8),
    LoraCase(8, rank=32),
    LoraCase(8, rank=64),
    LoraCase(8, shared=True),
    LoraCase(8, gated=True),
    LoraCase(8, live=False, gather=True),
    LoraCase(1, gather=True),
    LoraCase(8, gather=True),
)

LAYER_TOKENS = (1, 8, 32, 64, 256, 1024, 4096)
LAYER_SHAPES = (QWEN3_30B_A3B, DEEPSEEK_V3_EP8)

TRAINING_SHAPE = QWEN3_30B_A3B
TRAINING_ROWS = 32768
TRAINING_RANK = 16
TRAINING_SLOTS = (1, 8)
TRAINING_TFLOPS = Target(450, 520)  # at least


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Paged attention of one layer.

    Attributes:
      model: whose heads.
      kv_heads: heads of the cache; 0: latents, whose keys are the values and the rotary part.
      tokens: how many each request has in the batch: 1, or its whole context.
      bound: which ceiling `must` and `aim` are shares of: "bandwidth" or "products".
      gradients: of whole contexts of grouped heads, not the result.
      sinks: grouped heads have them.
    """

    name: str
    model: ExpertShape
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    requests: int
    context: int
    bound: str
    must: float
    aim: float
    tokens: int = 1
    page: int = 64
    window: int | None = None
    gradients: bool = False
    sinks: bool = False

    @property
    def work(self) -> Work:
        """Every visible pair; queries, result and the visible cache once.

        Gradients: five products of every pair, three of them as wide as keys; every array twice.
        """
        first = self.context - self.tokens
        seen = [min(p + 1, self.window or p + 1) for p in range(first, self.context)]
        widths = self.key_width + self.value_width
        cached = self.kv_heads * widths if self.kv_heads else self.key_width
        positions = min(self.context, (self.window or self.context) + self.tokens - 1)
        moved = positions * cached + self.tokens * self.heads * widths
        if self.gradients:
            widths, moved = 3 * self.key_width + 2 * self.value_width, 2 * moved
        return Work(
            2 * self.requests * self.heads * widths * sum(seen), ITEM * self.requests * moved
        )


_BANDWIDTH = dict(bound="bandwidth", must=0.75, aim=0.88)
_PRODUCTS = dict(bound="products", must=400 / 790, aim=560 / 790)
_LATENT = dict(model=DEEPSEEK_V3, heads=128, kv_heads=0, key_width=576, value_width=512)
_LITE = _LATENT | dict(model=DEEPSEEK_V2_LITE, heads=16)
_OF_TWO = _LATENT | dict(heads=64)  # a GPU's share of DeepSeek-V3's heads
_QWEN = dict(model=QWEN3_30B_A3B, heads=32, kv_heads=4, key_width=128, value_width=128)
_GPT = dict(model=GPT_OSS_20B, heads=64, kv_heads=8, key_width=64, value_width=64, sinks=True)
_WHOLE = dict(requests=2, context=4096, tokens=4096) | _PRODUCTS
_GRADIENTS = _WHOLE | dict(requests=1, must=265 / 790, aim=400 / 790, gradients=True)
ATTENTION_CASES: tuple[AttentionCase, ...] = (
    AttentionCase("grouped decode", **_QWEN, requests=64, context=4096, **_BANDWIDTH),
    AttentionCase("pages of 16", **_QWEN, requests=64, context=4096, page=16, **_BANDWIDTH),
    AttentionCase("few requests", **_QWEN, requests=4, context=32768, **_BANDWIDTH),
    AttentionCase("grouped prefill", **_QWEN, **_WHOLE),
    AttentionCase("grouped gradients", **_QWEN, **_GRADIENTS),
    AttentionCase("window decode", **_GPT, requests=64, context=4096, window=128, **_BANDWIDTH),
    AttentionCase("latent decode", **_LATENT, requests=64, context=4096, **_BANDWIDTH),
    AttentionCase("latent decode, 128", **_LATENT, requests=128, context=4096, **_BANDWIDTH),
    AttentionCase("latent decode, long", **_LATENT, requests=64, context=32768, **_BANDWIDTH),
    AttentionCase("latent decode, products", **_LATENT, requests=128, context=8192, **_PRODUCTS),
    AttentionCase("64 heads decode", **_OF_TWO, requests=64, context=4096, **_BANDWIDTH),
    AttentionCase("64 heads decode, 128", **_OF_TWO, requests=128, context=4096, **_BANDWIDTH),
    AttentionCase("64 heads decode, long", **_OF_TWO, requests=64, context=32768, **_BANDWIDTH),
    AttentionCase("16 heads decode", **_LITE, requests=64, context=4096, **_BANDWIDTH),
    AttentionCase("16 heads decode, 128", **_LITE, requests=128, context=4096, **_BANDWIDTH),
    AttentionCase("16 heads decode, long", **_LITE, requests=64, context=32768, **_BANDWIDTH),
    AttentionCase("16 heads, few requests", **_LITE, requests=4, context=32768, **_BANDWIDTH),
    AttentionCase("latent prefill", **_LATENT, **_WHOLE),
)

LOWERING_SECONDS = Target(3, 3)


def named(names: tuple[str, ...]) -> tuple[ExpertShape, ...]:
    """The shapes of these names; all of them for none."""
    return tuple(EXPERT_SHAPES[name] for name in names or EXPERT_SHAPES)
