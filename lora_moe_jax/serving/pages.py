"""The pages of the cache: which can be had, and how many a request needs."""

from __future__ import annotations

from lora_moe_jax.serving.prefix_cache import PrefixCache


class PagePool:
    """Hands out page numbers: those that hold nothing first, then idle ones of the prefix cache.

    A page is with one of three: nobody, the one request that took it, or `prefixes`.
    """

    def __init__(self, pages: int, page_size: int):
        self.total = pages
        self.page_size = page_size
        self.prefixes = PrefixCache(page_size)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that no running request has."""
        return len(self._free) + self.prefixes.idle

    def needed(self, tokens: int) -> int:
        """Pages for this many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Takes `count` pages; the caller has checked `free`."""
        return [self._free.pop() if self._free else self.prefixes.evict() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Returns pages to the pool."""
        self._free.extend(reversed(pages))
