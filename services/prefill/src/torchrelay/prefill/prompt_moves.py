"""Prompts that move between prefill workers with what is computed of them.

The scheduler recalls a prompt that would have its first token sooner elsewhere. The worker that leaves it keeps its
state, and computes on, until the next worker asks for its offer, which it does once it has pages for the prompt. The
bytes then take the path of a hand-over. Every failure has the same end: the next worker computes the prompt from its
beginning, in those pages.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, TypeVar

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, DataCorrupted, TorchrelayError
from torchrelay.common.liveness import SILENT_S
from torchrelay.control.v1 import decode_pb2, prefill_pb2
from torchrelay.engine.core import GroupSpec, KvBlock
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.export import PrefillExport
from torchrelay.engine.kv.layout import context_digests
from torchrelay.engine.kv.prefill_import import PrefillImport
from torchrelay.prefill.byte_budget import ByteBudget
from torchrelay.prefill.kv_sender import KvSendBuffer
from torchrelay.transfer.errors import TicketRefused
from torchrelay.transfer.fetch.follow import Receiver
from torchrelay.transfer.protocol.tickets import verify_ticket
from torchrelay.worker.attempts.attempt import group_id_of
from torchrelay.worker.kv_receiver import KvReceiver
from torchrelay.worker.role import RoleContext
from torchrelay.worker.slot.engine_thread import EngineThread

T = TypeVar("T")

# Chunks are copied in pieces between two layers, which may take milliseconds, so that smaller pieces would move a long
# prompt too slowly; the copy of a piece takes milliseconds, too.
_PIECE_BYTES: Final = 16 << 20
_KEPT_S: Final = SILENT_S  # limit of each wait: for the request, for the copy of a piece, for the end of the stream
OFFER_S: Final = SILENT_S  # for the offer; then the prompt is computed from its beginning
_STALL_S: Final = SILENT_S / 2  # without a byte; then the prompt is computed from its beginning


def check_ticket(request: prefill_pb2.PromptRequest, holder: Receiver) -> None:
    """Raises ``TicketRefused`` unless the scheduler has recalled the prompt from this holder for another worker."""
    verify_ticket(request.ticket, holder.id, holder.node_key, now_unix_us() // 1000)
    if request.ticket.buffer_id != f"{group_id_of(request.key)}/prompt":
        raise TicketRefused("the ticket is not for this prompt")


class RecalledPrompts:
    """Recalled prompts, until another worker has received them."""

    def __init__(self, worker: RoleContext, budget: ByteBudget) -> None:
        """``budget``: of the bytes that wait for other workers."""
        self._worker, self._budget = worker, budget
        self._timers: dict[str, asyncio.TimerHandle] = {}  # of prompts for which no worker has asked yet
        self._leaving: set[str] = set()

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._timers or group_id in self._leaving

    def keep(self, group_id: str) -> None:
        """Keeps the engine's state of a prompt for ``_KEPT_S``."""
        self._timers[group_id] = asyncio.get_running_loop().call_later(_KEPT_S, self._drop, group_id)

    def drop_prefilled(self, group_ids: Iterable[str]) -> None:
        """Drops prompts that are computed to their end: they cannot be exported any more."""
        for group_id in group_ids:
            if group_id in self._timers:
                self._drop(group_id)

    async def export(self, group_id: str, buffer_id: str) -> PrefillExport:
        """Stops a prompt and serves what is computed of it as a buffer; afterwards nothing is left of it here.

        Raises ``Conflict`` if it is not kept, or is not at a layer boundary.
        """
        if (timer := self._timers.pop(group_id, None)) is None:
            raise Conflict(f"nothing is kept of {group_id}")
        timer.cancel()
        self._leaving.add(group_id)
        engine = self._worker.engine
        try:
            instance = engine.require_relay_instance()
            exported = await engine.call(_of(engine, instance, lambda: instance.export_prefill(group_id)))
            await self._budget.acquire(exported.layout.num_kv_bytes)
            try:
                buffer = KvSendBuffer(buffer_id, exported.layout, asyncio.Event(), serves_one_stream=True)
                self._worker.buffers[buffer_id] = buffer
                self._worker.spawn(self._send(group_id, instance, exported, buffer), f"prompt {group_id}")
            except BaseException:
                self._budget.release(exported.layout.num_kv_bytes)
                raise
        except BaseException:
            self._drop(group_id)
            raise
        return exported

    async def _send(self, group_id: str, instance: Instance, exported: PrefillExport, buffer: KvSendBuffer) -> None:
        """Publishes the chunks, then frees the prompt; serves them until they are received, or are needed no more."""
        engine = self._worker.engine
        try:
            for piece in exported.layout.pieces(_PIECE_BYTES):
                publish = _of(engine, instance, partial(_publish_piece, exported, piece, buffer))
                async with asyncio.timeout(_KEPT_S):
                    await engine.call_between_layers(publish)
                if buffer.received.is_set():
                    return
            self._drop(group_id)
            if buffer.num_chunks:
                async with asyncio.timeout(_KEPT_S):
                    await buffer.received.wait()
        except TorchrelayError as error:
            buffer.fail(error.message)
        except TimeoutError:
            buffer.fail(f"its chunks were not copied, or not received, within {_KEPT_S:g} s")
        except Exception as error:
            buffer.fail(f"its chunks could not be copied: {error}")
            raise
        finally:
            self._worker.buffers.pop(buffer.buffer_id, None)
            self._budget.release(exported.layout.num_kv_bytes)
            if group_id in self._leaving:
                self._drop(group_id)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _drop(self, group_id: str) -> None:
        if (timer := self._timers.pop(group_id, None)) is not None:
            timer.cancel()
        self._leaving.discard(group_id)
        self._worker.cancel(group_id)


def _of(engine: EngineThread, instance: Instance, command: Callable[[], T]) -> Callable[[], T]:
    """The command; it raises ``Conflict`` if the instance was unloaded, whose pages may be another model's."""

    def run() -> T:
        if engine.instance is not instance:
            raise Conflict("the instance was unloaded")
        return command()

    return run


def _publish_piece(exported: PrefillExport, piece: range, buffer: KvSendBuffer) -> None:
    for index in piece:
        buffer.publish(index, exported.read(index))


class PromptReceiver:
    """A prompt that another worker has begun, from the wait for pages until it continues in the engine."""

    def __init__(
        self, engine: EngineThread, group: GroupSpec, pack_id: str, on_kv: Callable[[KvBlock], None] | None
    ) -> None:
        self._engine, self._group, self._pack_id, self._on_kv = engine, group, pack_id, on_kv
        self._proceed = asyncio.Event()  # it has pages, or the attempt has ended
        self._is_stopped = False
        self._kv_receiver: KvReceiver[PrefillImport] | None = None
        self._piece: list[Callable[[], None]] = []  # copies of chunks that have arrived
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Ends the wait for pages and the import, because the attempt has ended."""
        self._is_stopped = True
        self._proceed.set()
        if self._kv_receiver is not None:
            self._kv_receiver.stop()

    async def reserve(self) -> None:
        """Queues the prompt and waits until it has its pages. Raises ``TorchrelayError`` if it cannot run here."""
        self._instance = instance = self._engine.require_relay_instance()

        def queue() -> PrefillImport:
            return instance.import_prefill(self._group, self._on_kv, self._has_pages)

        self._import = await self._call(queue)
        await self._proceed.wait()

    def _has_pages(self) -> None:
        self._loop.call_soon_threadsafe(self._proceed.set)

    async def receive(self, offer: decode_pb2.KvOffer, worker: RoleContext, threads: Executor) -> int:
        """Imports the offered prompt; returns its boundary. At boundary 0 nothing is imported.

        Raises ``DataCorrupted`` or ``InvalidRequest`` if the offer is not of this prompt, ``Conflict`` if the instance
        was unloaded or the attempt has ended, or the errors of the transfer.
        """
        if offer.pack_id != self._pack_id or tuple(offer.context_digests) != context_digests(self._group):
            raise DataCorrupted("the offer is of other tokens, or of another pack")
        if not offer.boundary:
            return 0
        layout = await self._call(lambda: self._import.receive(offer.boundary, offer.block_tokens))
        self._piece_chunks = max(1, _PIECE_BYTES // max(layout.chunk_sizes))
        self._copying: asyncio.Future[Any] | None = None
        self._kv_receiver = KvReceiver(offer, self._import, worker.receiver, worker.transport)
        if not self._is_stopped:
            await self._loop.run_in_executor(threads, self._kv_receiver.receive, self._write, _STALL_S)
        if self._is_stopped:
            raise Conflict("the attempt has ended")
        await self._copy_piece()
        await self._copied()
        return offer.boundary

    def _write(self, copy_chunk: Callable[[], None], stop: threading.Event) -> None:
        """(receiving thread) Has a piece copied once it is here; waits until the piece before has been copied."""
        self._piece.append(copy_chunk)
        if len(self._piece) == self._piece_chunks:
            asyncio.run_coroutine_threadsafe(self._copy_piece(), self._loop).result()

    async def _copy_piece(self) -> None:
        """Starts to copy a piece. At most two pieces are here: one arrives while the engine copies the other."""
        piece, self._piece = self._piece, []
        await self._copied()
        self._copying = self._call(lambda: [copy_chunk() for copy_chunk in piece])

    async def _copied(self) -> None:
        """Waits for the copy that runs, if any does: each turn between two layers may be tens of milliseconds away."""
        if self._copying is not None:
            await self._copying

    async def start(self) -> None:
        """Continues the imported prompt. Raises ``Conflict`` if its instance is gone."""
        if self._on_kv is not None:
            for layers in self._import.layout.layer_ranges(_PIECE_BYTES):
                await self._call(partial(self._import.hand_over, layers))
        await self._call(self._import.start)

    async def start_over(self) -> None:
        """Computes the prompt from its beginning. Raises ``Conflict`` if its instance is gone."""
        await self._call(self._import.start_over)

    def _call(self, command: Callable[[], T]) -> asyncio.Future[T]:
        return self._engine.call_between_layers(_of(self._engine, self._instance, command))
