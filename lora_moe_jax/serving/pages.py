"""The pages of the cache: which are free, and how many a request needs."""

from __future__ import annotations


class PagePool:
    """Hands out page numbers, lowest first."""

    def __init__(self, pages: int, page_size: int):
        self.total = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages for this many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Takes `count` pages; the caller has checked `free`."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Returns pages to the pool."""
        self._free.extend(reversed(pages))
