"""Prompts that move between prefill workers with what is computed of them.

The scheduler recalls a prompt that would have its first token sooner elsewhere. The worker that leaves it keeps its
state, and computes on, until the next worker exports it. Every failure has the same end: the next worker computes the
prompt from its beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from typing import Final

from torchrelay.common.errors import Conflict, DataCorrupted
from torchrelay.common.liveness import SILENT_S
from torchrelay.control.v1 import prefill_pb2
from torchrelay.engine.core import GroupSpec, KvBlock
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.prefill_import import PrefillImport
from torchrelay.engine.kv.prefill_layout import PrefillExport
from torchrelay.worker.role import RoleContext
from torchrelay.worker.slot.engine_thread import EngineThread

_PART_BYTES: Final = 1 << 20
_KEPT_S: Final = SILENT_S  # for a worker to export the prompt; usually it takes milliseconds


class RecalledPrompts:
    """Recalled prompts that no worker has exported yet."""

    def __init__(self, worker: RoleContext) -> None:
        self._worker = worker
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._timers

    def keep(self, group_id: str) -> None:
        """Keeps the engine's state of a prompt for ``_KEPT_S``."""
        self._timers[group_id] = asyncio.get_running_loop().call_later(_KEPT_S, self._drop, group_id)

    def drop_prefilled(self, group_ids: Iterable[str]) -> None:
        """Drops prompts that are computed to their end: they cannot be exported any more."""
        for group_id in group_ids:
            if (timer := self._timers.get(group_id)) is not None:
                timer.cancel()
                self._drop(group_id)

    async def export(self, group_id: str) -> PrefillExport:
        """Takes a prompt. Raises ``Conflict`` if it is not kept, or is not at a layer boundary."""
        if (timer := self._timers.pop(group_id, None)) is None:
            raise Conflict(f"nothing is kept of {group_id}")
        timer.cancel()
        try:
            return await self._worker.engine.call(
                lambda: self._worker.engine.require_instance().export_prefill(group_id)
            )
        finally:
            self._worker.cancel(group_id)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _drop(self, group_id: str) -> None:
        del self._timers[group_id]
        self._worker.cancel(group_id)


def export_parts(exported: PrefillExport) -> Iterator[prefill_pb2.ExportPart]:
    """The messages of an export."""
    layout = exported.layout
    prompt = prefill_pb2.ExportedPrompt(boundary=layout.boundary, block_tokens=layout.block_tokens)
    yield prefill_pb2.ExportPart(prompt=prompt)
    for chunk in exported.chunks:
        for begin in range(0, len(chunk), _PART_BYTES):
            yield prefill_pb2.ExportPart(data=bytes(chunk[begin : begin + _PART_BYTES]))


class PromptReceiver:
    """Imports the messages of an export into the engine."""

    def __init__(self, engine: EngineThread, group: GroupSpec, on_kv: Callable[[KvBlock], None] | None) -> None:
        self._engine, self._group, self._on_kv = engine, group, on_kv
        self._instance: Instance | None = None
        self._import: PrefillImport | None = None
        self._stopped = False

    def stop(self) -> None:
        """Frees the pages; chunks that are still under way are ignored. A prompt that has been started continues."""
        self._stopped = True
        self._engine.post(self._drop)

    async def receive(self, parts: AsyncIterable[prefill_pb2.ExportPart]) -> int:
        """Imports the prompt; returns its boundary. At boundary 0 nothing is imported.

        Raises ``TorchrelayError`` or what ``parts`` raises; then the engine holds nothing of the prompt.
        """
        messages = aiter(parts)
        head = await anext(messages, None)
        if head is None or not head.HasField("prompt"):
            raise DataCorrupted("an export must begin with its prompt")
        if not head.prompt.boundary:
            return 0
        if not head.prompt.block_tokens:
            raise DataCorrupted("an export with layers must name its block_tokens")
        try:
            await self._engine.call(lambda: self._reserve(head.prompt))
            await self._write(messages)
        except BaseException:
            self.stop()  # also a reservation whose caller was cancelled
            raise
        return head.prompt.boundary

    def _reserve(self, prompt: prefill_pb2.ExportedPrompt) -> None:
        self._instance = instance = self._engine.require_instance()
        layout = instance.prefill_layout(self._group, prompt.boundary, prompt.block_tokens)
        self._import = instance.import_prefill(self._group, layout, self._on_kv)

    async def _write(self, parts: AsyncIterator[prefill_pb2.ExportPart]) -> None:
        prompt_import = self._import
        assert prompt_import is not None
        sizes = prompt_import.layout.chunk_sizes
        index, received = 0, bytearray()
        async for part in parts:
            if self._stopped:
                raise Conflict("the attempt has ended")
            received += part.data
            while index < len(sizes) and len(received) >= sizes[index]:
                data, received = bytes(received[: sizes[index]]), received[sizes[index] :]
                # Not awaited: between two steps all writes that have arrived run.
                self._engine.post(partial(self._write_chunk, prompt_import, index, data))
                index += 1
        if index < len(sizes) or received:
            raise DataCorrupted(f"the export has {index} of {len(sizes)} chunks, and {len(received)} bytes more")

    def _write_chunk(self, prompt_import: PrefillImport, index: int, data: bytes) -> None:
        if self._engine.instance is self._instance:  # else the pool may belong to another model by now
            prompt_import.write(index, data)

    async def start(self) -> None:
        """Continues the imported prompt. Raises ``Conflict`` if its instance is gone."""
        await self._engine.call(self._start)

    def _start(self) -> None:
        assert self._import is not None
        if self._engine.instance is not self._instance:
            raise Conflict("the instance was unloaded")
        self._import.start()

    def _drop(self) -> None:
        if self._import is not None:
            self._import.drop()
