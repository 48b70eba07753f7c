"""The static sizes of a Hopper attention kernel, and how they share its memory."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from pallas_kernels import implementation
from pallas_kernels.hopper.machine import SHARED_MEMORY

ROWS = 64  # (token, head) pairs of a tile
MANY_TOKENS = 512  # of a step: tiles share the blocks that are loaded, or find them in the L2
MOST_LINES_BESIDE = 2  # of values, where two warpgroups have sums of all of them
BLOCK = 64  # positions of a step: part of the contract, as it decides the order of sums
LINE = 64  # columns of a copy: 128 bytes, the widest swizzle
LINE_BYTES = 128 * BLOCK
LINES_OF_CONSUMER = 4  # of values: more do not fit into a warpgroup's registers
LINES_OF_PIECE = 2  # that are loaded and multiplied together, where two consumers share values
LINES_OF_LARGE_PIECE = 4
MIN_STAGES, MOST_STAGES = 2, 6
# Positions after which sums begin anew, to be joined: part of the contract, too. A join costs a
# program 0.1 µs, where a block of 64 takes 0.8 µs. Two consumers' registers have no room for the
# sums of the splits before, which are in memory, where a join takes 7 µs: so their splits are
# longer. Where a token's heads are several units, they are that many times as long: as many
# programs share a sequence.
SPLIT = 256
SHARED_SPLIT = 2048
WORTH = 4  # rounds, one after another, that take as long as a kernel that joins
MOST_BYTES = 1 << 28  # of partial sums in memory


class Columns(NamedTuple):
    """Columns of a cache that a copy brings: the ones of this number, each of `Sizes.widths`."""

    cache: int
    number: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one kernel.

    Attributes:
      heads: query heads. kv_heads: heads of the cache.
      lines: lines of a position in each cache.
      key_lines: how many of them, from the first, are keys.
      value_cache: whose first `value_lines` lines are values.
      page: positions of a page. window: how many positions a token sees, its own included.
      split: positions of a split.
      spread: several programs share a sequence: they store partial sums of this many splits at
        most. 0: a program has all of it.
      tiles: tiles of 64 rows in a unit, each with a consumer of its own.
      sinks: whether each head has a score that no position has.
    """

    tokens: int
    heads: int
    kv_heads: int
    lines: tuple[int, ...]
    key_lines: int
    value_cache: int
    value_lines: int
    page: int
    window: int | None
    scale: float
    interpreted: bool
    split: int = SPLIT
    spread: int = 0
    tiles: int = 1
    sinks: bool = False

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
        """Query heads of a tile."""
        return self.heads // self.parts

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return ROWS // self.group

    @property
    def unit(self) -> int:
        """Tokens of a unit."""
        return self.tile * self.tiles

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
        """Warpgroups that share a tile's columns of values."""
        return -(-self.value_lines // LINES_OF_CONSUMER)

    @property
    def warpgroups(self) -> int:
        """Those that multiply."""
        return self.consumers * self.tiles

    @property
    def memory_warpgroup(self) -> bool:
        """Whether there is one more, which loads what they multiply.

        Two that multiply need more registers than each of three warpgroups begins with. Where these
        cannot be given away there are but two, who load as well.
        """
        return self.warpgroups == 1 or implementation.REGISTERS_MOVE

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
        splits = -(-positions // self.split)
        if self.window is not None:
            splits = min(splits, (self.window + self.unit - 3) // self.split + 2)
        return splits

    def spread_over(self, positions: int, programs: int) -> Sizes:
        """The same, spread if that is faster; bits are the same."""
        splits, units = self.splits(positions), self.tokens * self.parts
        if splits == 1:
            return self
        seen = min(positions, (self.window or positions) + self.unit - 1)
        saved = -(-seen // self.round_size) - self.rounds
        idle = 4 * units <= 3 * programs
        sums = 4 * splits * units * self.rows_of_sums * self.value_lines * LINE
        spread = dataclasses.replace(self, spread=splits)
        faster = idle and saved >= WORTH and sums <= MOST_BYTES and spread.stages >= MIN_STAGES
        return spread if faster else self

    def with_its_split(self) -> Sizes:
        shared = SHARED_SPLIT * self.units_of_head
        return dataclasses.replace(self, split=SPLIT if self.consumers == 1 else shared)

    def with_two_tiles(self) -> Sizes:
        """The same with two tiles a unit, if that is faster and fits; bits are the same."""
        two = dataclasses.replace(self, tiles=2)
        many = self.tokens >= MANY_TOKENS and self.value_lines <= MOST_LINES_BESIDE
        return two if many and two.stages >= MIN_STAGES else self

    @property
    def stages(self) -> int:
        """Blocks in shared memory, a whole number for each consumer."""
        fixed = self.tiles * max(self.key_lines, self.value_lines) * LINE_BYTES
        if self.spread and self.consumers == 1:
            fixed += 2 * self.value_lines * LINE_BYTES
        stages = min(MOST_STAGES, (SHARED_MEMORY - fixed) // (sum(self.lines) * LINE_BYTES))
        return stages // self.consumers * self.consumers

    @property
    def rows_of_sums(self) -> int:
        """Rows of a split's sums in memory, for each token.

        Two consumers store whole tiles from their registers, which have no room beside them.
        """
        return ROWS if self.consumers > 1 else self.group

    @property
    def own_columns(self) -> int:
        """Columns of values that a consumer sums up."""
        return self.value_lines * LINE // self.consumers

    @property
    def lines_of_piece(self) -> int:
        """Of values. Large pieces are fewer instructions; small ones are loaded earlier.

        Blocks of a prompt are in the L2, as other tiles read them too, and come soon.
        """
        large = self.spread or self.tokens >= MANY_TOKENS
        return LINES_OF_LARGE_PIECE if large else LINES_OF_PIECE

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each cache that a copy brings, and a product of values has."""
        widths = [lines * LINE for lines in self.lines]
        if self.consumers > 1:
            widths[self.value_cache] = math.gcd(self.own_columns, self.lines_of_piece * LINE)
        return tuple(widths)

    @property
    def value_width(self) -> int:
        return self.widths[self.value_cache]

    def copies(self, cache: int) -> int:
        """How many copies bring a cache's columns."""
        return self.lines[cache] * LINE // self.widths[cache]

    def pieces(self, owner) -> list[list[Columns]]:
        """The columns of a block that are loaded, and given back, together.

        With two consumers: the values that its owner adds, those that the other adds, and the rest,
        which the other gives back, too.
        """
        if self.consumers == 1:
            return [[Columns(cache, 0) for cache in range(len(self.lines))]]
        half = self.copies(self.value_cache) // 2
        pieces = [
            [Columns(self.value_cache, whose * half + number)]
            for whose in (owner, 1 - owner)
            for number in range(half)
        ]
        rest = range(self.value_cache + 1, len(self.lines))
        return [*pieces, [Columns(cache, 0) for cache in rest]]

    def name(self) -> str:
        columns = f"k{self.key_lines * LINE}_v{self.value_lines * LINE}"
        tiles = f"_x{self.tiles}" if self.tiles > 1 else ""
        spread = "_spread" if self.spread else ""
        sinks = "_sinks" if self.sinks else ""
        return f"paged_attention_h{self.heads}_g{self.kv_heads}_{columns}{sinks}{tiles}{spread}"


def grouped_sizes(q, k_pages, v_pages, scale, window, sinks, interpreted=False) -> Sizes:
    """Of `api.paged_attention`."""
    keys, values = k_pages.shape[3] // LINE, v_pages.shape[3] // LINE
    sizes = Sizes(
        *q.shape[:2],
        kv_heads=k_pages.shape[2],
        lines=(keys, values),
        key_lines=keys,
        value_cache=1,
        value_lines=values,
        page=k_pages.shape[1],
        window=window,
        scale=scale,
        interpreted=interpreted,
        sinks=sinks,
    )
    return sizes.with_its_split().with_two_tiles()


def latent_sizes(q_latent, latent_pages, rope_pages, scale, interpreted=False) -> Sizes:
    """Of `api.paged_latent_attention`: the latents are keys, with the rotary part, and values."""
    latent, rope = latent_pages.shape[2] // LINE, rope_pages.shape[2] // LINE
    sizes = Sizes(
        *q_latent.shape[:2],
        kv_heads=1,
        lines=(latent, rope),
        key_lines=latent + rope,
        value_cache=0,
        value_lines=latent,
        page=latent_pages.shape[1],
        window=None,
        scale=scale,
        interpreted=interpreted,
    )
    return sizes.with_its_split()
