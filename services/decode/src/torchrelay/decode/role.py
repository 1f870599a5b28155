"""The decode role: receives KV from prefill workers and delivers all tokens but the first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest, TorchrelayError
from torchrelay.common.identity.callers import Caller, MethodCallers
from torchrelay.common.liveness import SILENT_S
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.common.process.telemetry import get_logger, record_span
from torchrelay.control.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.decode.page_queue import PageQueue
from torchrelay.engine.core import NewToken
from torchrelay.engine.kv.kv_import import KvImport
from torchrelay.engine.kv.layout import KvLayout, KvSequence
from torchrelay.worker.attempts.attempt import Attempt, group_id_of
from torchrelay.worker.kv_receiver import KvReceiver
from torchrelay.worker.role import RoleContext, WorkerRole

log = get_logger(__name__)
CALLERS: MethodCallers = {
    "/torchrelay.control.v1.Decode/Run": {Caller.GATEWAY},
    "/torchrelay.control.v1.Decode/Receive": {Caller.WORKER},
}
KV_SILENT_S = SILENT_S / 2  # a source that becomes silent is tried once more


class DecodeRole(WorkerRole, decode_pb2_grpc.DecodeServicer):  # type: ignore[misc]  # Run writes to its context
    """Decodes an attempt once both its AttemptStart and all of its KV are here, in either order."""

    number = types_pb2.ROLE_DECODE

    def __init__(self, worker: RoleContext) -> None:
        super().__init__(worker)
        self._kv_receivers: dict[str, KvReceiver[KvImport]] = {}
        self._page_queue = PageQueue()
        self._threads = ThreadPoolExecutor(worker.settings.max_incoming, thread_name_prefix="kv")

    @property
    def num_kv_transfers(self) -> int:
        return len(self._kv_receivers)

    def register(self, server: RpcServer) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server.server)
        server.allow(CALLERS)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for kv_receiver in self._kv_receivers.values():
                kv_receiver.stop()
            await asyncio.to_thread(self._threads.shutdown)

    async def begin(self, attempt: Attempt) -> None:
        """Does nothing: the KV offer, or this worker's prefill role, waits for the attempt and continues."""

    # -- receiving KV ----------------------------------------------------------------------------------------------

    async def Receive(
        self, request: decode_pb2.KvOffer, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.KvAccept:
        hosted = self.worker.slot.require_instance(request.instance_id)
        if hosted.version.pack_id != request.pack_id:
            raise Conflict("the KV was computed with another pack", field="pack_id")
        group_id = group_id_of(request.key)
        if request.source.ticket.buffer_id != group_id:
            raise InvalidRequest("the ticket is not for this attempt's KV", field="source")
        attempt = await self.wait_for_start(group_id)
        kv_import = await self._reserve_pages(attempt, request)
        worker = self.worker
        kv_receiver = KvReceiver(request, kv_import, worker.receiver, worker.transport)
        if not self.is_running(attempt):
            self._release_reserved([kv_import])
            raise Conflict("the attempt was cancelled")
        self._kv_receivers[group_id] = kv_receiver
        self.spawn(attempt, self._receive_kv(attempt, kv_receiver), "kv")
        return decode_pb2.KvAccept()

    async def _reserve_pages(self, attempt: Attempt, offer: decode_pb2.KvOffer) -> KvImport:
        """Reserves the attempt's pages, waiting in turn while there are too few."""
        group = attempt.group()
        sequences = tuple(KvSequence(tuple(s.choices), s.num_context_tokens) for s in offer.sequences)
        reserved: list[KvImport] = []

        def reserve() -> KvImport:
            instance = self.worker.engine.require_relay_instance()
            reserved.append(instance.import_kv(group, KvLayout(instance.kv_shape, offer.block_tokens, sequences)))
            return reserved[0]

        try:
            kv_import = await self._page_queue.reserve(
                lambda: self.worker.engine.call(reserve), lambda: self.is_running(attempt)
            )
        except asyncio.CancelledError:  # the prefill worker has left, but the engine may still reserve
            self._release_reserved(reserved)
            raise
        if kv_import is None:
            raise Conflict("the attempt was cancelled")
        return kv_import

    def _release_reserved(self, reserved: list[KvImport]) -> None:
        """Frees the imports in the list after all commands posted so far have run."""

        def drop() -> None:
            for kv_import in reserved:
                kv_import.drop()

        self.worker.engine.post(drop)
        self.worker.pages_freed()

    def pages_freed(self) -> None:
        self._page_queue.pages_freed()

    async def _receive_kv(self, attempt: Attempt, kv_receiver: KvReceiver[KvImport]) -> None:
        """Receives the KV, then starts decoding."""
        begin_us = now_unix_us()
        # A prefill worker that has nothing to send yet says so many times a second, so a silent worker hangs.
        stall_s = min(self.worker.settings.kv_timeout_s, KV_SILENT_S)
        receive = asyncio.get_running_loop().run_in_executor(
            self._threads, kv_receiver.receive, self.worker.engine.write, stall_s
        )
        try:
            trailer = await receive
            self.worker.step_metrics.kv_bytes_received += kv_receiver.num_bytes
            first_tokens = kv_receiver.kv_import.layout.unpack_trailer(attempt.group_id, trailer)
        except (TorchrelayError, OSError) as error:
            if self.is_running(attempt):
                message = f"the KV transfer failed: {error}"
                self.fail(attempt, pb.RunError(code=pb.RunError.CODE_PREFILL_LOST, message=message))
            return
        if not self.is_running(attempt):
            return
        end_us = now_unix_us()
        attempt.phases.append(types_pb2.Phase(name="kv", begin_unix_us=begin_us, end_unix_us=end_us))
        record_span(
            "decode.kv_receive",
            attempt.start.traceparent,
            begin_us * 1000,
            end_us * 1000,
            num_bytes=kv_receiver.num_bytes,
        )
        continuing = self._continuing_choices(attempt, first_tokens)
        if continuing:
            await self.worker.engine.call(lambda: kv_receiver.kv_import.start(continuing))
            self._kv_receivers.pop(attempt.group_id, None)

    def _continuing_choices(self, attempt: Attempt, first_tokens: tuple[NewToken, ...]) -> dict[int, int]:
        """The choices that continue after their first token, with that token."""
        continuing: dict[int, int] = {}
        for token in first_tokens:
            if token.choice in attempt.open_choices:
                if attempt.finish_of(token) is None:
                    continuing[token.choice] = token.token_id
                else:
                    attempt.open_choices.discard(token.choice)
        if not attempt.open_choices:
            self.forget(attempt)
        return continuing

    # -- tokens ------------------------------------------------------------------------------------------------------

    def delivers(self, attempt: Attempt, token: NewToken) -> bool:
        return token.position > attempt.num_forced(token.choice)

    def drop(self, attempt: Attempt) -> None:
        kv_receiver = self._kv_receivers.pop(attempt.group_id, None)
        if kv_receiver is not None:
            kv_receiver.stop()
            self._release_reserved([kv_receiver.kv_import])
        self._page_queue.attempt_ended()  # the attempt's own offer may be waiting
        record_span("decode.run", attempt.start.traceparent, attempt.began_us * 1000, now_unix_us() * 1000)
