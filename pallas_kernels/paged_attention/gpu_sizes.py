"""The static sizes of a Hopper attention kernel, and how they share its memory."""

from __future__ import annotations

import dataclasses

from pallas_kernels.hopper.machine import SHARED_MEMORY

ROWS = 64  # (token, head) pairs of a unit
BLOCK = 64  # positions of a step: part of the contract, as it decides the order of sums
LINE = 64  # columns of a copy: 128 bytes, the widest swizzle
LINE_BYTES = 128 * BLOCK
LINES_OF_CONSUMER = 4  # of values: more do not fit into a warpgroup's registers
LINES_OF_PIECE = 2
MOST_STAGES = 6


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one kernel.

    Attributes:
      heads: query heads. kv_heads: heads of the cache.
      lines: lines of a position in each cache.
      key_lines: how many of them, from the first, are keys. first_value, value_lines: those that
        are values.
      page: positions of a page. window: how many positions a token sees, its own included.
    """

    tokens: int
    heads: int
    kv_heads: int
    lines: tuple[int, ...]
    key_lines: int
    first_value: int
    value_lines: int
    page: int
    window: int | None
    scale: float
    interpreted: bool

    @property
    def units_of_head(self) -> int:
        """Units that share a head of the cache, where more than 64 query heads do."""
        return -(-self.heads // self.kv_heads // ROWS)

    @property
    def parts(self) -> int:
        """Units of a tile of tokens."""
        return self.kv_heads * self.units_of_head

    @property
    def group(self) -> int:
        """Query heads of a unit."""
        return self.heads // self.parts

    @property
    def tile(self) -> int:
        """Tokens of a unit."""
        return ROWS // self.group

    @property
    def copy(self) -> int:
        """Positions of one copy: a page, or the part of it that a block has."""
        return min(self.page, BLOCK)

    @property
    def consumers(self) -> int:
        return -(-self.value_lines // LINES_OF_CONSUMER)

    @property
    def stages(self) -> int:
        """Blocks in shared memory, a whole number for each consumer."""
        fixed = max(self.key_lines, self.value_lines) * LINE_BYTES
        stages = min(MOST_STAGES, (SHARED_MEMORY - fixed) // (sum(self.lines) * LINE_BYTES))
        return stages // self.consumers * self.consumers

    def pieces(self, owner) -> list[list]:
        """The lines of a block that are loaded, and given back, together.

        With two consumers: the values that its owner adds, those that the other adds, and the rest,
        which the other gives back, too.
        """
        if self.consumers == 1:
            return [list(range(sum(self.lines)))]
        half = self.value_lines // 2
        pieces = [
            [whose * half + line for line in range(first, min(first + LINES_OF_PIECE, half))]
            for whose in (owner, 1 - owner)
            for first in range(0, half, LINES_OF_PIECE)
        ]
        return [*pieces, list(range(self.value_lines, sum(self.lines)))]

    def name(self) -> str:
        columns = f"k{self.key_lines * LINE}_v{self.value_lines * LINE}"
        return f"paged_attention_h{self.heads}_g{self.kv_heads}_{columns}"


def grouped_sizes(q, k_pages, v_pages, scale, window, interpreted=False) -> Sizes:
    """Of `api.paged_attention`."""
    keys, values = k_pages.shape[3] // LINE, v_pages.shape[3] // LINE
    return Sizes(
        *q.shape[:2],
        kv_heads=k_pages.shape[2],
        lines=(keys, values),
        key_lines=keys,
        first_value=keys,
        value_lines=values,
        page=k_pages.shape[1],
        window=window,
        scale=scale,
        interpreted=interpreted,
    )


def latent_sizes(q_latent, latent_pages, rope_pages, scale, interpreted=False) -> Sizes:
    """Of `api.paged_latent_attention`: the latents are keys, with the rotary part, and values."""
    latent, rope = latent_pages.shape[2] // LINE, rope_pages.shape[2] // LINE
    return Sizes(
        *q_latent.shape[:2],
        kv_heads=1,
        lines=(latent, rope),
        key_lines=latent + rope,
        first_value=0,
        value_lines=latent,
        page=latent_pages.shape[1],
        window=None,
        scale=scale,
        interpreted=interpreted,
    )
