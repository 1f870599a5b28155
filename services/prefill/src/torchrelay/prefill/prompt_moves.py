"""Prompts that move between prefill workers with what is computed of them.

The scheduler recalls a prompt that would have its first token sooner elsewhere. The worker that leaves it keeps its
state, and computes on, until the next worker exports it, which it does once it has pages for the prompt. Every failure
has the same end: the next worker computes the prompt from its beginning, in those pages.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from functools import partial
from typing import Final, TypeVar

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, DataCorrupted, Unavailable
from torchrelay.common.liveness import SILENT_S
from torchrelay.control.v1 import prefill_pb2, types_pb2
from torchrelay.engine.core import GroupSpec, KvBlock
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.export import PrefillExport
from torchrelay.engine.kv.layout import KvLayout, context_digests
from torchrelay.engine.kv.prefill_import import PrefillImport
from torchrelay.transfer.errors import TicketRefused, WrongReceiver
from torchrelay.transfer.fetch.follow import Receiver
from torchrelay.transfer.protocol.tickets import prove_session, unseal_session, verify_ticket
from torchrelay.worker.attempts.attempt import group_id_of
from torchrelay.worker.role import RoleContext
from torchrelay.worker.slot.engine_thread import EngineThread

T = TypeVar("T")

# Chunks are copied in pieces between two layers, which may take milliseconds, so that smaller pieces would move a long
# prompt too slowly; the copy of a piece takes milliseconds, too.
_PIECE_BYTES: Final = 16 << 20
_MESSAGE_BYTES: Final = 1 << 20
_KEPT_S: Final = SILENT_S  # for a worker to ask for the prompt, and then for each piece; usually it takes milliseconds
_MESSAGE_S: Final = SILENT_S  # for each message of an export; then the prompt is computed from its beginning


def export_request(source: types_pb2.PromptSource, receiver: Receiver) -> prefill_pb2.ExportRequest:
    """The request of the receiver that the source's ticket names. Raises ``TicketRefused``."""
    ticket = source.ticket
    # A fixed challenge is enough, because a prompt is exported once: a copy of the request is worth nothing.
    proof = prove_session(unseal_session(ticket, receiver.node_key), b"receiver", ticket.nonce)
    return prefill_pb2.ExportRequest(key=source.key, ticket=ticket, proof=proof)


def check_request(request: prefill_pb2.ExportRequest, holder: Receiver) -> None:
    """Raises ``TicketRefused`` unless the scheduler lets the caller export the prompt from this holder."""
    ticket = request.ticket
    session = verify_ticket(ticket, holder.id, holder.node_key, now_unix_us() // 1000)
    if ticket.buffer_id != f"{group_id_of(request.key)}/prompt":
        raise TicketRefused("the ticket is not for this prompt")
    if not hmac.compare_digest(request.proof, prove_session(session, b"receiver", ticket.nonce)):
        raise WrongReceiver("the caller is not the ticket's receiver")


class RecalledPrompts:
    """Recalled prompts, until another worker has exported them."""

    def __init__(self, worker: RoleContext) -> None:
        self._worker = worker
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._leaving: set[str] = set()  # prompts that a worker is exporting

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._timers

    def keep(self, group_id: str) -> None:
        """Keeps the engine's state of a prompt for ``_KEPT_S``."""
        self._timers[group_id] = asyncio.get_running_loop().call_later(_KEPT_S, self._drop, group_id)

    def _keep_on(self, group_id: str) -> None:
        """Keeps a prompt for ``_KEPT_S`` from now on. Raises ``Conflict`` if it was dropped."""
        if (timer := self._timers.get(group_id)) is None:
            raise Conflict(f"{group_id} has ended")
        timer.cancel()
        self.keep(group_id)

    def drop_prefilled(self, group_ids: Iterable[str]) -> None:
        """Drops prompts that are computed to their end: they cannot be exported any more."""
        for group_id in group_ids:
            if (timer := self._timers.get(group_id)) is not None:
                timer.cancel()
                self._drop(group_id)

    async def export(self, group_id: str, pack_id: str) -> AsyncGenerator[prefill_pb2.ExportPart, None]:
        """Stops a prompt and yields the messages of its export; afterwards nothing is left of it here.

        Raises ``Conflict`` if it is not kept, is not at a layer boundary, or ends meanwhile.
        """
        if group_id in self._leaving or group_id not in self._timers:
            raise Conflict(f"nothing is kept of {group_id}")
        self._keep_on(group_id)
        self._leaving.add(group_id)
        engine = self._worker.engine
        try:
            instance = engine.require_relay_instance()
            exported = await engine.call(_of(engine, instance, lambda: instance.export_prefill(group_id)))
            layout = exported.layout
            prompt = prefill_pb2.ExportedPrompt(
                boundary=layout.shape.num_layers,
                block_tokens=layout.block_tokens,
                pack_id=pack_id,
                context_digests=context_digests(exported.spec),
            )
            yield prefill_pb2.ExportPart(prompt=prompt)
            for piece in layout.pieces(_PIECE_BYTES):
                self._keep_on(group_id)  # the other worker does not hang
                read = _of(engine, instance, partial(_read_piece, exported, piece))
                data = await engine.call_between_layers(read)
                for begin in range(0, len(data), _MESSAGE_BYTES):
                    yield prefill_pb2.ExportPart(data=data[begin : begin + _MESSAGE_BYTES])
        finally:
            self._leaving.discard(group_id)
            if (timer := self._timers.get(group_id)) is not None:
                timer.cancel()
                self._drop(group_id)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _drop(self, group_id: str) -> None:
        del self._timers[group_id]
        self._worker.cancel(group_id)


def _of(engine: EngineThread, instance: Instance, command: Callable[[], T]) -> Callable[[], T]:
    """The command; it raises ``Conflict`` if the instance was unloaded, whose pages may be another model's."""

    def run() -> T:
        if engine.instance is not instance:
            raise Conflict("the instance was unloaded")
        return command()

    return run


def _read_piece(exported: PrefillExport, piece: range) -> bytes:
    return b"".join(exported.read(index) for index in piece)


class PromptReceiver:
    """A prompt that another worker has begun, from the wait for pages until it continues in the engine."""

    def __init__(
        self, engine: EngineThread, group: GroupSpec, pack_id: str, on_kv: Callable[[KvBlock], None] | None
    ) -> None:
        self._engine, self._group, self._pack_id, self._on_kv = engine, group, pack_id, on_kv
        self._proceed = asyncio.Event()  # it has pages, or the attempt has ended
        self._is_stopped = False
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Ends the wait for pages and the import, because the attempt has ended."""
        self._is_stopped = True
        self._proceed.set()

    async def reserve(self) -> None:
        """Queues the prompt and waits until it has its pages. Raises ``TorchrelayError`` if it cannot run here."""
        self._instance = instance = self._engine.require_relay_instance()

        def queue() -> PrefillImport:
            return instance.import_prefill(self._group, self._on_kv, self._has_pages)

        self._import = await self._call(queue)
        await self._proceed.wait()

    def _has_pages(self) -> None:
        self._loop.call_soon_threadsafe(self._proceed.set)

    async def receive(self, parts: AsyncIterable[prefill_pb2.ExportPart]) -> int:
        """Imports the messages of an export; returns its boundary. At boundary 0 nothing is imported.

        Raises ``DataCorrupted`` or ``InvalidRequest`` if they are not an export of this prompt, ``Conflict`` if the
        instance was unloaded, ``Unavailable`` if no message comes for ``_MESSAGE_S``, or what ``parts`` raises.
        """
        messages = aiter(parts)
        head = await _next(messages)
        if head is None or not head.HasField("prompt"):
            raise DataCorrupted("an export must begin with its prompt")
        prompt = head.prompt
        if prompt.pack_id != self._pack_id or tuple(prompt.context_digests) != context_digests(self._group):
            raise DataCorrupted("the export is of other tokens, or of another pack")
        if not prompt.boundary:
            return 0
        layout = await self._call(lambda: self._import.receive(prompt.boundary, prompt.block_tokens))
        await self._write(layout, messages)
        return prompt.boundary

    async def _write(self, layout: KvLayout, messages: AsyncIterator[prefill_pb2.ExportPart]) -> None:
        """Writes the chunks. At most two pieces are here: one arrives while the engine copies the other."""
        received = bytearray()
        writing: asyncio.Future[None] | None = None
        for piece in layout.pieces(_PIECE_BYTES):
            num_bytes = sum(map(layout.chunk_bytes, piece))
            while len(received) < num_bytes:
                if (part := await _next(messages)) is None:
                    raise DataCorrupted(f"the export ends before chunk {piece.stop} of {layout.num_chunks}")
                if self._is_stopped:
                    raise Conflict("the attempt has ended")
                received += part.data
            data, received = bytes(received[:num_bytes]), received[num_bytes:]
            if writing is not None:
                await writing
            writing = self._call(partial(_write_piece, self._import, piece, data))
        if writing is not None:
            await writing
        if received or await _next(messages) is not None:
            raise DataCorrupted(f"the export does not end after {layout.num_chunks} chunks")

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


async def _next(messages: AsyncIterator[prefill_pb2.ExportPart]) -> prefill_pb2.ExportPart | None:
    """The next message; None after the last."""
    try:
        async with asyncio.timeout(_MESSAGE_S):
            return await anext(messages, None)
    except TimeoutError:
        raise Unavailable(f"the export was silent for {_MESSAGE_S:g} s") from None


def _write_piece(prompt_import: PrefillImport, piece: range, data: bytes) -> None:
    begin = 0
    for index in piece:
        end = begin + prompt_import.layout.chunk_bytes(index)
        prompt_import.write(index, memoryview(data)[begin:end])
        begin = end
