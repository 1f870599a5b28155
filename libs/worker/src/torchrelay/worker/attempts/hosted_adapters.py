"""The LoRA adapters that attempts have used of the hosted model, kept in memory beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from cachetools import LRUCache

from torchrelay.control.v1 import types_pb2
from torchrelay.engine.kernels.low_rank import Adapter

READ_TIMEOUT_S: Final = 60.0
MAX_BYTES: Final = 1 << 30  # the largest adapter that a store accepts, widened to fp32


class HostedAdapters:
    """The adapters of the hosted instance. The longest unused leave first; groups that run keep theirs."""

    def __init__(self, read: Callable[[str], Awaitable[bytes]], max_bytes: int = MAX_BYTES) -> None:
        """``read`` returns the verified file of a digest."""
        self._read = read
        self._max_bytes = max_bytes
        self._instance_id = ""
        self._adapters = self._empty()
        self._reading = asyncio.Lock()  # the files of one adapter at a time are in memory, beside the adapters

    def _empty(self) -> LRUCache[str, Adapter]:
        return LRUCache(self._max_bytes, getsizeof=lambda adapter: adapter.num_bytes)

    async def get(
        self,
        instance_id: str,
        wanted: types_pb2.Adapter,
        make: Callable[[str, bytes, bytes], Awaitable[Adapter]],
    ) -> Adapter:
        """The adapter for the hosted instance. ``make`` gets its id and the contents of its two files.

        Raises ``TorchrelayError``.
        """
        if instance_id != self._instance_id:
            self._instance_id, self._adapters = instance_id, self._empty()
        if (adapter := self._adapters.get(wanted.adapter_id)) is not None:
            return adapter
        async with self._reading:
            if instance_id == self._instance_id and (adapter := self._adapters.get(wanted.adapter_id)) is not None:
                return adapter
            document, weights = await self._read(wanted.config_digest), await self._read(wanted.weights_digest)
            adapter = await make(wanted.adapter_id, document, weights)
            if instance_id == self._instance_id and adapter.num_bytes <= self._max_bytes:
                self._adapters[wanted.adapter_id] = adapter
            return adapter
