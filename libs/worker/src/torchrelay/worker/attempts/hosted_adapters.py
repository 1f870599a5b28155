"""The LoRA adapters that attempts have used of the hosted model, kept in memory beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from cachetools import LRUCache

from torchrelay.common.errors import Overloaded
from torchrelay.common.quantities import format_bytes
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.kernels.low_rank import Adapter

READ_TIMEOUT_S: Final = 60.0
MAX_BYTES: Final = 1 << 30  # the largest adapter that a store accepts, widened to fp32
Reserve: TypeAlias = Callable[[int], None]  # raises ``Overloaded`` if the bytes find no place


class HostedAdapters:
    """The adapters of the hosted instance, and those that groups still use, within ``max_bytes`` together. The longest
    unused leave first.
    """

    def __init__(self, read: Callable[[str], Awaitable[bytes]], max_bytes: int = MAX_BYTES) -> None:
        """``read`` returns the verified file of a digest."""
        self._read = read
        self._max_bytes = max_bytes
        self._instance_id = ""
        self.clear()
        self._reading = asyncio.Lock()  # the files of one adapter at a time are in memory, beside the adapters

    def clear(self) -> None:
        """Forgets all adapters, for the hosted instance is unloaded."""
        self._instance_id = ""
        self._kept: LRUCache[str, Adapter] = LRUCache(self._max_bytes, getsizeof=lambda adapter: adapter.num_bytes)
        self._in_memory: WeakValueDictionary[str, Adapter] = WeakValueDictionary()  # also those of groups alone

    async def get(
        self,
        instance_id: str,
        wanted: types_pb2.Adapter,
        make: Callable[[str, bytes, bytes, Reserve], Awaitable[Adapter]],
    ) -> Adapter:
        """The adapter for the hosted instance. ``make`` gets its id and the contents of its two files, and reserves the
        memory before it takes any.

        Raises ``TorchrelayError``.
        """
        if instance_id != self._instance_id:
            self.clear()
            self._instance_id = instance_id
        if (adapter := self._known(wanted.adapter_id)) is not None:
            return adapter
        async with self._reading:
            if instance_id == self._instance_id and (adapter := self._known(wanted.adapter_id)) is not None:
                return adapter
            document, weights = await self._read(wanted.config_digest), await self._read(wanted.weights_digest)
            adapter = await make(wanted.adapter_id, document, weights, self._reserve)
            if instance_id == self._instance_id:
                self._in_memory[wanted.adapter_id] = self._kept[wanted.adapter_id] = adapter
            return adapter

    def _known(self, adapter_id: str) -> Adapter | None:
        adapter = self._in_memory.get(adapter_id)
        if adapter is not None:
            self._kept[adapter_id] = adapter
        return adapter

    def _reserve(self, num_bytes: int) -> None:
        while self._num_bytes + num_bytes > self._max_bytes:
            if not self._kept:
                raise Overloaded(
                    f"the adapter has {format_bytes(num_bytes)} and those of running requests "
                    f"{format_bytes(self._num_bytes)}; a worker holds {format_bytes(self._max_bytes)}",
                    field="model",
                )
            self._kept.popitem()

    @property
    def _num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in list(self._in_memory.values()))
