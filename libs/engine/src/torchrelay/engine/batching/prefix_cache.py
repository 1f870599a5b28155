"""The prefix cache: which pages hold the KV of which beginnings of prompts.

A page enters once every layer of it is computed. Nobody needs to hold it: when its last table lets go it stays, idle,
until the pool wants it back, the longest unused first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from torchrelay.common.tokens.prefix_hashes import page_hashes
from torchrelay.engine.batching.pages import PageAllocator


class PrefixCache:
    """Pages by the key of their prefix. ``enabled`` False: nothing is ever kept or found."""

    def __init__(self, allocator: PageAllocator, page_tokens: int, enabled: bool = True) -> None:
        self._allocator = allocator
        self._page_tokens = page_tokens
        self._enabled = enabled
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        allocator.on_reclaim = self._forget

    def find(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the longest known beginning, at least one token less than all: that must be computed."""
        if not self._pages:
            return []
        known = takewhile(self._pages.__contains__, page_hashes(salt, tokens[:-1], self._page_tokens))
        return [self._pages[key] for key in known]

    def keep(self, salt: str, tokens: Sequence[int], table: Iterable[int]) -> None:
        """All full pages of ``tokens`` are computed, and lie in ``table``."""
        if not self._enabled:
            return
        for key, page in zip(page_hashes(salt, tokens, self._page_tokens), table, strict=False):
            if key not in self._pages:
                self._pages[key] = page
                self._keys[page] = key
                self._allocator.retain(page)

    def check_integrity(self) -> None:
        """Both directions agree, and the allocator knows of every page. Raises ``AssertionError``."""
        assert {page: key for key, page in self._pages.items()} == self._keys, "a key and its page disagree"
        assert self._allocator.retained == self._keys.keys(), "the allocator retains other pages"

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
