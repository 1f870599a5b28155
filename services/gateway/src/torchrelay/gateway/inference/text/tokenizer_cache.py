"""An LRU cache of tokenizers, bounded in bytes."""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from torchrelay.common.errors import Unavailable
from torchrelay.common.tokens.tokenizer import load_tokenizer
from torchrelay.gateway.clients.file_reader import StoreFileReader

MAX_FILE_BYTES = 64 << 20
LOAD_TIMEOUT_S = 60.0
BYTES_PER_FILE_BYTE = 5.5  # memory of a loaded BPE per byte of its compact JSON


@dataclass(frozen=True, slots=True)
class _Entry:
    tokenizer: Tokenizer
    num_bytes: int


class TokenizerCache:
    """Evicts the least recently used, never the last one used. Loads one at a time, each digest once.

    Requests hold references to their tokenizers, so eviction does not affect them.
    """

    # Not cachetools.LRUCache: that refuses an entry larger than the cache, and evicts only after loading.

    def __init__(self, files: StoreFileReader, max_bytes: int) -> None:
        self._files = files
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._loading = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def num_bytes(self) -> int:
        """The estimated memory of the cached tokenizers."""
        return sum(entry.num_bytes for entry in self._entries.values())

    async def get(self, digest: str) -> Tokenizer:
        """The tokenizer with this BLAKE3 digest. Raises ``TorchrelayError`` if it cannot be loaded."""
        entry = self._entries.get(digest)
        if entry is None:
            try:
                async with asyncio.timeout(LOAD_TIMEOUT_S), self._loading:
                    entry = self._entries.get(digest) or await self._load(digest)
            except TimeoutError:
                raise Unavailable(f"the model's tokenizer could not be loaded within {LOAD_TIMEOUT_S:g} s") from None
        self._entries[digest] = entry
        self._entries.move_to_end(digest)
        self._evict(num_kept=1)
        return entry.tokenizer

    async def _load(self, digest: str) -> _Entry:
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory(prefix="torchrelay-tokenizer-") as folder:
            path = Path(folder, "tokenizer.json")
            num_bytes = await self._files.save(digest, "tokenizer.json", MAX_FILE_BYTES, path)
            self._evict(0, int(num_bytes * BYTES_PER_FILE_BYTE))
            tokenizer = await loop.run_in_executor(self._thread, load_tokenizer, path)
        return _Entry(tokenizer, int(num_bytes * BYTES_PER_FILE_BYTE))

    def _evict(self, num_kept: int, num_bytes_needed: int = 0) -> None:
        while len(self._entries) > num_kept and self.num_bytes + num_bytes_needed > self._max_bytes:
            self._entries.popitem(last=False)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` if the cache exceeds its limit."""
        assert len(self._entries) <= 1 or self.num_bytes <= self._max_bytes, "tokenizers exceed the byte limit"
