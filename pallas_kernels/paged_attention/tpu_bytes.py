"""How many bytes the TPU attention kernel moves from and to HBM, over the fewest there can be.

Counted from the tiles and sizes that the kernel runs by, for one batch; no TPU is needed.
`python -m pallas_kernels.paged_attention.tpu_bytes` prints the named shapes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels.grouped_lora_matmul.tpu_schedule import LANES, Device, round_up
from pallas_kernels.paged_attention.api import PageView
from pallas_kernels.paged_attention.tiles import TILE_WORDS, token_tiles
from pallas_kernels.paged_attention.tpu_sizes import Sizes

ITEM = 2  # bytes of a bfloat16
PAGE, REQUESTS, LONGEST = 16, 64, 4096


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One layer's attention; `kv_heads` is 0 for latents, whose widths are latent and rotary."""

    name: str
    heads: int
    kv_heads: int
    widths: tuple[int, int]
    window: int | None = None

    def sizes(self, view: PageView, page: int = PAGE) -> Sizes:
        return Sizes(
            tokens=len(view.request),
            heads=self.heads,
            kv_heads=self.kv_heads or 1,
            widths=self.widths,
            key_caches=1 if self.kv_heads else 2,
            value_cache=1 if self.kv_heads else 0,
            item=ITEM,
            page=page,
            requests=view.page_tables.shape[0],
            table_columns=view.page_tables.shape[1],
            window=self.window,
            scale=1.0,
            vmem=Device().budget,
            interpreted=False,
        )


SHAPES = (
    AttentionShape("qwen3-30b-a3b", 32, 4, (128, 128)),
    AttentionShape("gpt-oss, window", 64, 8, (64, 64), 128),
    AttentionShape("gpt-oss", 64, 8, (64, 64)),
    AttentionShape("deepseek-v3", 128, 0, (512, 64)),
    AttentionShape("deepseek-v2-lite", 16, 0, (512, 64)),
)


class Moved(NamedTuple):
    """Bytes by what they are; `least` is what any kernel moves that reads a position once."""

    caches: int
    rows: int
    tables: int
    least: int

    @property
    def ratio(self) -> float:
        return (self.caches + self.rows + self.tables) / self.least


def attention_bytes(sizes: Sizes, view: PageView, cores: int = 1) -> Moved:
    """What one call moves."""
    s = sizes
    found = _tiles(view.request, view.positions, height=s.height)
    words = np.asarray(found.words).reshape(-1, TILE_WORDS)[: int(found.count[0])]
    _, tokens, request, position = words[words[:, 2] >= 0].T
    last = position + tokens - 1
    first = np.zeros_like(position) if s.window is None else np.maximum(position - s.window + 1, 0)
    pages = last // s.copy - first // s.copy + 1
    seen = {
        (of, at)
        for of, begin, end in zip(request, first, last, strict=True)
        for at in range(begin, end + 1)
    }
    widths = (*s.widths[: s.key_caches], s.value_width)
    in_hbm = s.kv_heads * s.rows_of_token * sum(round_up(width, LANES) for width in widths)
    return Moved(
        caches=int(pages.sum()) * s.copy * s.position_bytes,
        rows=s.tokens * in_hbm * s.item,
        tables=cores * s.scalar_bytes,
        least=s.item * (len(seen) * s.kv_heads * sum(s.widths) + s.tokens * s.heads * sum(widths)),
    )


def _tiles(request, positions, height: int):
    return _jitted(PageView(request, positions, None), height=height)


_jitted = jax.jit(token_tiles, static_argnames="height")


def decode(seed: int = 0) -> PageView:
    """A token each at the end of requests of any length."""
    positions = np.random.default_rng(seed).integers(0, LONGEST, REQUESTS).astype(np.int32)
    return PageView(np.arange(REQUESTS, dtype=np.int32), positions, _no_pages())


def prefill(tokens: int = 512, first: int = LONGEST // 2) -> PageView:
    """A chunk of one request."""
    positions = np.arange(first, first + tokens, dtype=np.int32)
    return PageView(np.zeros(tokens, np.int32), positions, _no_pages())


def _no_pages():
    return np.zeros((REQUESTS, LONGEST // PAGE), np.int32)


def main():
    """Prints one line for each shape and batch."""
    for shape in SHAPES:
        for name, view in ("decode", decode()), ("prefill", prefill()):
            moved = attention_bytes(shape.sizes(view), view)
            parts = (f"{part} {getattr(moved, part) / 1e6:.1f} MB" for part in moved._fields)
            print(f"{shape.name:18s}{name:9s}{moved.ratio:6.3f}  {', '.join(parts)}")


if __name__ == "__main__":
    main()
