"""The prefix cache: pages by the prompt prefix whose KV they hold.

A page is added once all its layers are computed. When its last table releases it, it stays idle until the pool reclaims
it, the longest unused first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from torchrelay.common.tokens.prefix_hashes import page_hashes
from torchrelay.engine.batching.pages import PageAllocator


class PrefixCache:
    """Pages by the key of their prefix. Always empty unless ``enabled``."""

    def __init__(self, allocator: PageAllocator, page_tokens: int, enabled: bool = True) -> None:
        self._allocator = allocator
        self._page_tokens = page_tokens
        self._enabled = enabled
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        allocator.on_reclaim = self._forget

    def find(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest known prefix, without the last token at least, which must be computed."""
        if not self._pages:
            return []
        known = takewhile(self._pages.__contains__, page_hashes(salt, tokens[:-1], self._page_tokens))
        return [self._pages[key] for key in known]

    def keep(self, salt: str, tokens: Sequence[int], table: Iterable[int]) -> None:
        """Adds all full pages of ``tokens``, which are computed and in ``table``."""
        if not self._enabled:
            return
        for key, page in zip(page_hashes(salt, tokens, self._page_tokens), table, strict=False):
            if key not in self._pages:
                self._pages[key] = page
                self._keys[page] = key
                self._allocator.retained.add(page)

    def check_integrity(self) -> None:
        """Checks that both maps and the allocator agree. Raises ``AssertionError``."""
        assert {page: key for key, page in self._pages.items()} == self._keys, "a key and its page disagree"
        assert self._allocator.retained == self._keys.keys(), "the allocator retains other pages"

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
