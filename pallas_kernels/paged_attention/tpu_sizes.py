"""How the TPU attention kernel is cut: a pure function of static shapes and the core's memory."""

from __future__ import annotations

import dataclasses
import functools

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_lora_matmul.tpu_schedule import (
    LANES,
    SMEM,
    Device,
    itemsize,
    round_up,
)
from pallas_kernels.paged_attention.tiles import TILE_WORDS

BLOCK = 256  # positions of a step: part of the contract, as it decides the order of sums
SUBLANES = 8  # rows of a float32 register
WINDOW_ROWS = 256  # rows of a product, where a tile has so many
TILE_WINDOWS = 4  # the most windows of a tile
STATE_ROWS = 4096  # of a tile, over all heads of the cache
MOST_STAGES = 8
MIN_STAGES = 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one kernel.

    Attributes:
      heads: query heads. kv_heads: heads of the cache.
      widths: columns of a head in each of the two caches. key_caches: how many of them, from the
        first, hold keys. value_cache: the one that holds values.
      item: bytes of one element, of caches and queries.
      page: positions of a page. requests, table_columns: sizes of the page tables.
      window: how many positions a token sees, its own included.
    """

    tokens: int
    heads: int
    kv_heads: int
    widths: tuple[int, int]
    key_caches: int
    value_cache: int
    item: int
    page: int
    requests: int
    table_columns: int
    window: int | None
    scale: float
    vmem: int
    interpreted: bool

    @property
    def group(self) -> int:
        """Query heads of a head of the cache."""
        return self.heads // self.kv_heads

    @property
    def rows_of_token(self) -> int:
        """Rows that a token has in a product: those of its group, filled up to whole registers."""
        return round_up(self.group, SUBLANES)

    @property
    def window_tokens(self) -> int:
        """Tokens of one product, where a tile has more than one."""
        return max(1, WINDOW_ROWS // self.rows_of_token)

    @property
    def height(self) -> int:
        """The most tokens of a tile."""
        rows = self.kv_heads * self.window_tokens * self.rows_of_token
        return self.window_tokens * max(1, min(TILE_WINDOWS, STATE_ROWS // rows))

    @property
    def value_width(self) -> int:
        return self.widths[self.value_cache]

    @property
    def copy(self) -> int:
        """Positions of one copy: a page, or the part of it that a block has."""
        return min(self.page, BLOCK)

    def line_width(self, cache: int) -> int:
        """Columns of one copy: heads that share words are taken apart 128 columns at a time."""
        width = self.widths[cache]
        return width if self.kv_heads == 1 else min(width, LANES)

    def lines(self, cache: int) -> list[pl.Slice]:
        """The columns of each copy."""
        width = self.line_width(cache)
        return [pl.ds(start, width) for start in range(0, self.widths[cache], width)]

    def block_shape(self, cache: int) -> tuple[int, ...]:
        """Of one block of positions in VMEM."""
        heads = () if self.kv_heads == 1 else (self.kv_heads,)
        return len(self.lines(cache)), BLOCK, *heads, self.line_width(cache)

    @property
    def position_bytes(self) -> int:
        """What a position of both caches takes, in HBM and VMEM: whole lanes."""
        return self.kv_heads * sum(round_up(w, LANES) for w in self.widths) * self.item

    @property
    def fixed_bytes(self) -> int:
        """VMEM besides the blocks of the caches: queries, results and running sums of a tile."""
        rows = self.height * self.kv_heads * self.rows_of_token
        queries = sum(round_up(w, LANES) for w in self.widths[: self.key_caches])
        values = round_up(self.value_width, LANES)
        return rows * ((2 * queries + values) * self.item + (2 * LANES + values) * 4)

    @functools.cached_property
    def stages(self) -> int:
        """Blocks of positions that VMEM holds."""
        return min(MOST_STAGES, (self.vmem - self.fixed_bytes) // (BLOCK * self.position_bytes))

    @property
    def scalar_bytes(self) -> int:
        """Of tiles and page tables, which lie in scalar memory."""
        return 4 * (self.tokens * TILE_WORDS + self.requests * self.table_columns)

    def name(self) -> str:
        keys = sum(self.widths[: self.key_caches])
        return f"paged_attention_h{self.heads}_g{self.kv_heads}_k{keys}_v{self.value_width}"

    def check(self):
        """Raises NotImplementedError, with the sizes, for what the kernel cannot serve."""
        if self.tokens == 0:
            self._refuse("there must be at least one token")
        if self.page % SUBLANES or (BLOCK % self.page and self.page % BLOCK):
            self._refuse(f"pages must have 8, 16, 32, 64, 128 or a multiple of {BLOCK} positions")
        if self.kv_heads & (self.kv_heads - 1):
            self._refuse("the cache must have 1, 2, 4, 8, ... heads")
        if any(width > LANES and width % LANES for width in self.widths):
            self._refuse(f"widths must be at most {LANES} or multiples of it")
        if self.stages < MIN_STAGES:
            self._refuse("two blocks of keys and values do not fit into VMEM")

    def check_tables(self):
        """Raises NotImplementedError for more tokens, or longer tables, than there is room for."""
        if self.scalar_bytes > SMEM * 3 // 4:
            self._refuse(
                f"tiles and page tables do not fit in the {SMEM >> 10} KiB of SMEM; fewer tokens, "
                "fewer requests or larger pages do"
            )

    def _refuse(self, why: str):
        raise NotImplementedError(f"mosaic_tpu: {why} ({self})")


def grouped_sizes(q, k_pages, v_pages, view, scale, window, device: Device) -> Sizes:
    """Of `api.paged_attention`."""
    return _sizes(
        q,
        k_pages,
        v_pages,
        view,
        kv_heads=k_pages.shape[2],
        key_caches=1,
        value_cache=1,
        window=window,
        scale=scale,
        device=device,
    )


def latent_sizes(q_latent, latent_pages, rope_pages, view, scale, device: Device) -> Sizes:
    """Of `api.paged_latent_attention`: the latents are keys, with the rotary part, and values."""
    return _sizes(
        q_latent,
        latent_pages,
        rope_pages,
        view,
        kv_heads=1,
        key_caches=2,
        value_cache=0,
        window=None,
        scale=scale,
        device=device,
    )


def _sizes(q, first, second, view, device: Device, **rest) -> Sizes:
    return Sizes(
        tokens=q.shape[0],
        heads=q.shape[1],
        widths=(first.shape[-1], second.shape[-1]),
        item=itemsize(q.dtype),
        page=first.shape[1],
        requests=view.page_tables.shape[0],
        table_columns=view.page_tables.shape[1],
        vmem=device.budget,
        interpreted=not pltpu.is_tpu_device(),
        **rest,
    )
