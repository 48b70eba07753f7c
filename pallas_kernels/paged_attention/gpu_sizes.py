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
MIN_STAGES, MOST_STAGES = 2, 6
# Positions after which sums begin anew, to be joined: part of the contract, too. A join costs a
# program 0.1 µs, where a block of 64 takes 0.8 µs. Sums of two consumers are never split: their
# registers have no room for those of the splits before, and in memory these cost a quarter.
SPLIT = 256
WORTH = 4  # rounds, one after another, that take as long as a kernel that joins
MOST_BYTES = 1 << 28  # of partial sums in memory


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one kernel.

    Attributes:
      heads: query heads. kv_heads: heads of the cache.
      lines: lines of a position in each cache.
      key_lines: how many of them, from the first, are keys. first_value, value_lines: those that
        are values.
      page: positions of a page. window: how many positions a token sees, its own included.
      split: positions of a split, with one consumer.
      spread: several programs share a sequence: they store partial sums of this many splits at
        most. 0: a program has all of it.
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
    split: int = SPLIT
    spread: int = 0

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
    def boxes(self) -> bool:
        """Whether copies find a tile's queries, and put results, where the caller has them.

        64 rows are a box of (token, head) then. Else, and in the interpreter, which sees no boxes
        in rows, arrays are transposed so that a part's rows follow each other.
        """
        return ROWS % self.group == 0 and not self.interpreted

    @property
    def copy(self) -> int:
        """Positions of one copy: a page, or the part of it that a block has."""
        return min(self.page, BLOCK)

    @property
    def consumers(self) -> int:
        return -(-self.value_lines // LINES_OF_CONSUMER)

    @property
    def round_size(self) -> int:
        """Positions of a round: one block for each consumer."""
        return self.consumers * BLOCK

    @property
    def rounds(self) -> int:
        """Rounds of a split."""
        return self.split // self.round_size

    def splits(self, positions: int) -> int:
        """How many splits a tile may see where requests have up to so many positions."""
        if self.consumers > 1:
            return 1
        splits = -(-positions // self.split)
        if self.window is not None:
            splits = min(splits, (self.window + self.tile - 3) // self.split + 2)
        return splits

    def spread_over(self, positions: int, programs: int) -> Sizes:
        """The same, spread if that is faster; bits are the same."""
        splits, units = self.splits(positions), self.tokens * self.parts
        if splits == 1:
            return self
        seen = min(positions, (self.window or positions) + self.tile - 1)
        saved = -(-seen // self.round_size) - self.rounds
        idle = 4 * units <= 3 * programs
        sums = 4 * splits * units * self.group * self.value_lines * LINE
        spread = dataclasses.replace(self, spread=splits)
        faster = idle and saved >= WORTH and sums <= MOST_BYTES and spread.stages >= MIN_STAGES
        return spread if faster else self

    @property
    def stages(self) -> int:
        """Blocks in shared memory, a whole number for each consumer."""
        fixed = max(self.key_lines, self.value_lines) * LINE_BYTES
        if self.spread:
            fixed += 2 * self.value_lines * LINE_BYTES
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
        spread = "_spread" if self.spread else ""
        return f"paged_attention_h{self.heads}_g{self.kv_heads}_{columns}{spread}"


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
