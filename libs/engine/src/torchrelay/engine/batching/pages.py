"""Page allocation and page tables; the bytes are in ``kv.pool``.

A page holds ``page_tokens`` positions of every layer. Pages are reference counted: choices of one group share the full
pages of their context, and groups those of a common prefix.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from torchrelay.engine.core import KvPoolFull


class PageAllocator:
    """The free pages, and for each other page the number of tables that hold it.

    A *retained* page that no table holds is idle: it counts as free, but is taken last, the longest idle first, and
    ``on_reclaim`` is called with it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.retained: set[int] = set()  # held pages added here become idle, not free, at their last release
        self.on_reclaim: Callable[[int], None] = lambda page: None
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_touched = 0  # pages from here on were never taken: a cold start need not list them
        self._free: list[int] = []
        self._holders = array("I", bytes(4 * num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle) + self.num_pages - self._num_touched

    def take(self, count: int) -> list[int]:
        """``count`` pages, each held once. Raises ``KvPoolFull`` and takes none when there are fewer."""
        if count > self.num_free:
            raise KvPoolFull(f"{count} KV pages are needed, {self.num_free} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(min(count, len(self._free)))]
        num_new = min(count - len(pages), self.num_pages - self._num_touched)
        pages += range(self._num_touched, self._num_touched + num_new)
        self._num_touched += num_new
        pages += [self._reclaim() for _ in range(count - len(pages))]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a table to the holders of each of these held or idle pages."""
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Removes a table from the holders of each page; the last release frees the page, or leaves it idle."""
        for page in reversed(pages):  # so that the end of a prefix is reclaimed first
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self.retained:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _reclaim(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self.retained.remove(page)
        self.on_reclaim(page)
        return page

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Checks that each page is free, idle, or held as often as it is in ``tables``. Raises ``AssertionError``."""
        held = Counter(page for table in tables for page in table)
        free = {*self._free, *self._idle}
        assert len(free) == len(self._free) + len(self._idle), "a page was freed twice"
        assert self._idle.keys() <= self.retained, "an idle page is not retained"
        assert not self.retained & set(self._free), "a retained page is free"
        assert not free & held.keys(), f"pages {free & held.keys()} are free and in use"
        for page in range(self._num_touched):
            assert self._holders[page] == held[page], f"page {page}: {self._holders[page]} holders, {held[page]} tables"
            assert held[page] or page in free, f"page {page} leaked"
        assert all(page < self._num_touched for page in held), "a page was never taken"


class PageTables:
    """The pages of one model, and tables over them."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.allocator = PageAllocator(num_pages)

    @property
    def scratch_slot(self) -> int:
        """A slot beyond all pages, for rows that are never read; only if the partition has one."""
        return self.allocator.num_pages * self.page_tokens

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def pages_to_reserve(self, num_context_tokens: int, num_tokens: int, num_tables: int) -> int:
        """Pages for ``num_tables`` sequences of up to ``num_tokens`` that share the full pages of their context."""
        num_shared = num_context_tokens // self.page_tokens
        return num_shared + num_tables * (self.pages_for(num_tokens) - num_shared)

    def reserve(
        self, num_context_tokens: int, num_tokens: int, num_tables: int, known: Sequence[int] = ()
    ) -> list[list[int]]:
        """Page tables as counted by ``pages_to_reserve``, starting with the ``known`` pages.

        Raises ``KvPoolFull`` and takes nothing if there are too few.
        """
        num_pages = self.pages_to_reserve(num_context_tokens, num_tokens, num_tables)
        self.allocator.share(known)  # first, or ``take`` might reclaim them
        try:
            pages = [*known, *self.allocator.take(num_pages - len(known))]
        except KvPoolFull:
            self.allocator.release(known)
            raise
        num_shared = num_context_tokens // self.page_tokens
        shared, own = pages[:num_shared], pages[num_shared:]
        for _ in range(num_tables - 1):
            self.allocator.share(shared)
        num_own = len(own) // num_tables
        return [shared + own[i * num_own : (i + 1) * num_own] for i in range(num_tables)]
