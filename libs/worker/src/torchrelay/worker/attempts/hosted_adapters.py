"""The LoRA adapters that attempts have used of the hosted model, kept in memory beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from torchrelay.common.errors import Overloaded
from torchrelay.common.quantities import format_bytes
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.core import GroupAdapter

READ_TIMEOUT_S: Final = 60.0
MAX_BYTES: Final = 1 << 30  # the largest adapter that a store accepts, widened to fp32
Reserve: TypeAlias = Callable[[int], None]  # raises ``Overloaded`` if the bytes find no place


class HostedAdapters:
    """The adapters of the hosted instance, within ``max_bytes``. The longest unused leave first, and never those that
    groups still use.
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
        self._kept: dict[str, GroupAdapter] = {}  # the longest unused first
        # A group gets a copy, which shares the weights: where a copy lives, an eviction would free nothing.
        self._in_use: WeakValueDictionary[str, GroupAdapter] = WeakValueDictionary()

    async def get(
        self,
        instance_id: str,
        wanted: types_pb2.Adapter,
        make: Callable[[str, bytes, bytes, Reserve], Awaitable[GroupAdapter]],
    ) -> GroupAdapter:
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
            if instance_id != self._instance_id:
                return adapter
            self._kept[wanted.adapter_id] = adapter
            return self._lend(wanted.adapter_id)

    def _known(self, adapter_id: str) -> GroupAdapter | None:
        return self._lend(adapter_id) if adapter_id in self._kept else None

    def _lend(self, adapter_id: str) -> GroupAdapter:
        self._kept[adapter_id] = adapter = self._kept.pop(adapter_id)
        return self._in_use.setdefault(adapter_id, copy(adapter))

    def _reserve(self, num_bytes: int) -> None:
        """Evicts as few unused adapters as needed. Raises ``Overloaded``, and evicts none, if all would not suffice."""
        num_bytes_used = sum(adapter.num_bytes for adapter in list(self._in_use.values()))
        if num_bytes_used + num_bytes > self._max_bytes:
            raise Overloaded(
                f"the adapter has {format_bytes(num_bytes)} and those of running requests "
                f"{format_bytes(num_bytes_used)}; a worker holds {format_bytes(self._max_bytes)}",
                field="model",
            )
        num_bytes_over = sum(adapter.num_bytes for adapter in self._kept.values()) + num_bytes - self._max_bytes
        for adapter_id, adapter in list(self._kept.items()):
            if num_bytes_over <= 0:
                return
            if adapter_id not in self._in_use:
                del self._kept[adapter_id]
                num_bytes_over -= adapter.num_bytes
