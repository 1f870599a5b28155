"""An LRU cache of decoders, which turn token ids into text; bounded in bytes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torchrelay.common.errors import Unavailable
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.common.tokens.token_decoder import TokenDecoder
from torchrelay.common.tokens.tokenizer import load_decoder
from torchrelay.gateway.inference.text.processes.process_connection import LocalFile
from torchrelay.gateway.inference.text.processes.tenant_lru import TenantLru
from torchrelay.gateway.limits.tenant_turns import TenantTurns

MAX_WAITING = 64  # of one tenant
MAX_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class ModelDecoder:
    """Turns a model's token ids into text, and single ids into bytes."""

    tokens: TokenDecoder
    token_bytes: TokenBytes

    @classmethod
    def load(cls, path: Path) -> ModelDecoder:
        """Raises ``InvalidRequest``."""
        tokens = load_decoder(path)
        return cls(tokens, TokenBytes(tokens))


class DecoderCache:
    """Loads one decoder at a time, the tenants in turn. A decoder larger than the cache is kept alone.

    Requests hold references to their decoders, so eviction does not affect them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._decoders: dict[str, ModelDecoder] = {}  # by digest
        self._lru: TenantLru[str] = TenantLru(max_bytes)
        self._turns = TenantTurns(
            at_once=1, total_at_once=1, max_waiting=MAX_WAITING, resource="the tokenizers of their models"
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")

    @property
    def num_bytes(self) -> int:
        """The memory of the cached decoders."""
        return self._lru.num_bytes

    def get(self, tenant: str, digest: str) -> ModelDecoder | None:
        """The decoder of the tokenizer with this BLAKE3 digest, if it is loaded."""
        decoder = self._decoders.get(digest)
        if decoder is not None:
            self._lru.use(digest, tenant)
        return decoder

    async def load(self, tenant: str, file: LocalFile) -> ModelDecoder:
        """The decoder of ``file``. Raises ``InvalidRequest``, ``QueueFull`` or ``Unavailable``."""
        digest = file.id[1]
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                begin_s = await self._turns.acquire(tenant)
        except TimeoutError:
            raise Unavailable(f"the model's tokenizer could not be loaded within {MAX_WAIT_S:g} s") from None
        if (decoder := self.get(tenant, digest)) is not None:  # loaded while this waited
            self._turns.release(tenant, begin_s)
            return decoder
        loop = asyncio.get_running_loop()
        loading = loop.run_in_executor(self._thread, ModelDecoder.load, file.path)

        def loaded(ended: asyncio.Future[ModelDecoder]) -> None:
            if not ended.cancelled() and ended.exception() is None:
                self._add(tenant, digest, ended.result())
            self._turns.release(tenant, begin_s)

        loading.add_done_callback(loaded)
        return await asyncio.shield(loading)  # the turn ends with the thread's work, not with the caller's wait

    def _add(self, tenant: str, digest: str, decoder: ModelDecoder) -> None:
        # Only the loaded decoder tells its size: files of the same size differ tenfold.
        num_bytes = decoder.tokens.num_bytes
        for evicted in self._lru.evict_for(num_bytes, tenant):
            del self._decoders[evicted]
        self._decoders[digest] = decoder
        self._lru.add(digest, tenant, num_bytes)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` if the cache exceeds its limit."""
        assert len(self._lru) <= 1 or self.num_bytes <= self._max_bytes, "decoders exceed the byte limit"
        assert set(self._lru) == set(self._decoders), "an entry without a decoder, or a decoder without an entry"
