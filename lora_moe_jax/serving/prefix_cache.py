"""Full pages of the cache by what is in them, so that requests that begin alike share them.

What a page holds follows from the version of the adapter and from all tokens up to its end. So it
is found by the page before it, the version if it is the first, and by its own tokens, which are
compared: nothing can be mistaken for it.

Who uses a page uses those before it too. So a page is never idle later than those after it; of the
idle ones the first to have become so is the one not used for longest, and none comes after it. It
can go, and what stays can be found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from lora_moe_jax.adapters.entry import Entry


@dataclass(eq=False)
class CachedPage:
    """A full page that nobody writes any more.

    Attributes:
      page: its number.
      adapter: the version that made it; None for the base model.
      key: what it is found by.
      users: running requests that have it.
    """

    page: int
    adapter: Entry | None
    key: PageKey
    users: int = 0


PageKey = tuple[CachedPage | Entry | None, tuple[int, ...]]


class PrefixCache:
    """Which full pages there are, and which of them nobody uses."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._pages: dict[PageKey, CachedPage] = {}
        self._idle: OrderedDict[CachedPage, None] = OrderedDict()  # idle for longest first

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def idle(self) -> int:
        """Pages that nobody uses."""
        return len(self._idle)

    def key(
        self,
        adapter: Entry | None,
        tokens: Sequence[int],
        chain: Sequence[CachedPage],
        limit: int,
    ) -> PageKey | None:
        """What the page after `chain` is found by; None if it ends after `limit` tokens."""
        end = (len(chain) + 1) * self.page_size
        if end > limit:
            return None
        return chain[-1] if chain else adapter, tuple(tokens[end - self.page_size : end])

    def find(self, adapter: Entry | None, tokens: Sequence[int], limit: int) -> list[CachedPage]:
        """The pages that hold the first tokens, as many as there are within `limit` tokens."""
        chain: list[CachedPage] = []
        while (found := self._pages.get(self.key(adapter, tokens, chain, limit))) is not None:
            chain.append(found)
        return chain

    def add(self, adapter: Entry | None, key: PageKey, page: int) -> CachedPage:
        """Keeps a page; if there is one of the same content already, that one. It is used once.

        The page before it must be in use.
        """
        found = self._pages.setdefault(key, CachedPage(page, adapter, key))
        self.use([found])
        return found

    def use(self, chain: Sequence[CachedPage]) -> None:
        """One more request has these pages."""
        for cached in chain:
            cached.users += 1
            self._idle.pop(cached, None)

    def release(self, chain: Sequence[CachedPage]) -> None:
        """One request less has these pages, all that it had."""
        for cached in reversed(chain):
            cached.users -= 1
            if not cached.users:
                self._idle[cached] = None

    def evict(self) -> int:
        """Forgets the page that was not used for longest; the caller has checked `idle`."""
        cached, _ = self._idle.popitem(last=False)
        del self._pages[cached.key]
        return cached.page

    def clear(self) -> list[int]:
        """Forgets all pages, none of which is in use."""
        pages = [cached.page for cached in self._idle]
        self._idle.clear()
        self._pages.clear()
        return pages

    def drop_unloaded(self) -> list[int]:
        """Forgets the pages of versions that nobody can ask for again, but for those in use."""
        unloaded = [c for c in self._idle if c.adapter is not None and c.adapter.adapter is None]
        for cached in unloaded:
            del self._idle[cached], self._pages[cached.key]
        return [cached.page for cached in unloaded]
