"""The decode role: takes KV over from prefill workers and delivers all tokens but the first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc

from torchrelay.common.errors import Conflict, InvalidRequest, TorchrelayError
from torchrelay.common.telemetry import get_logger, record_span
from torchrelay.control.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.decode.incoming import Incoming
from torchrelay.engine.adoption import Adoption
from torchrelay.engine.core import GroupSpec, KvPoolFull, NewToken
from torchrelay.engine.handover import KvLayout, KvSequence
from torchrelay.engine.instance import Instance
from torchrelay.worker.attempts import Attempt, group_id_of, now_us
from torchrelay.worker.roles import WorkerRole
from torchrelay.worker.worker import Worker

log = get_logger(__name__)


class DecodeRole(WorkerRole, decode_pb2_grpc.DecodeServicer):  # type: ignore[misc]  # Run writes to its context
    """Starts an attempt when both its AttemptStart and its whole KV are here, whichever came first."""

    number = types_pb2.ROLE_DECODE

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._incoming: dict[str, Incoming] = {}
        self._waiting_for_pages: set[asyncio.Event] = set()
        self._threads = ThreadPoolExecutor(worker.settings.max_incoming, thread_name_prefix="kv")

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for incoming in self._incoming.values():
                incoming.stop()
            await asyncio.to_thread(self._threads.shutdown)

    async def begin(self, attempt: Attempt) -> None:
        """Nothing to do yet: the KV offer, or this worker's own prefill role, was waiting for the attempt."""

    # -- taking KV over ----------------------------------------------------------------------------------------------

    async def Receive(
        self, request: decode_pb2.KvOffer, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.KvAccept:
        hosted = self.worker.slot.occupant(request.instance_id)
        if hosted.version.pack_id != request.pack_id:
            raise Conflict("the KV was computed with other weights", field="pack_id")
        group_id = group_id_of(request.key)
        if request.source.ticket.buffer_id != group_id:
            raise InvalidRequest("the ticket is for another attempt's KV", field="source")
        attempt = await self.expect(group_id)
        group = attempt.group()
        adoption, layout = await self._adopt(attempt, group, request)
        worker = self.worker
        incoming = Incoming(request, layout, adoption, worker.receiver, worker.transport, worker.settings.host_id)
        if not self.is_running(attempt):
            self._give_back([adoption])
            raise Conflict("the attempt was cancelled")
        self._incoming[group.group_id] = incoming
        self.spawn(attempt, self._take_over(attempt, incoming), "kv")
        return decode_pb2.KvAccept()

    async def _adopt(self, attempt: Attempt, group: GroupSpec, offer: decode_pb2.KvOffer) -> tuple[Adoption, KvLayout]:
        """Reserves pages; waits for other attempts to end while there are too few."""
        sequences = tuple(KvSequence(tuple(s.choices), s.num_context_tokens) for s in offer.sequences)

        reserved: list[Adoption] = []

        def reserve() -> tuple[Adoption, KvLayout]:
            instance = self._instance()
            layout = KvLayout(instance.kv_shape, offer.block_tokens, sequences)
            if layout != KvLayout.of(instance.kv_shape, offer.block_tokens, group):
                raise InvalidRequest("the offered KV does not fit the attempt", field="sequences")
            reserved.append(instance.adopt(group, layout))
            return reserved[0], layout

        freed = asyncio.Event()
        self._waiting_for_pages.add(freed)
        try:
            while self.is_running(attempt):
                freed.clear()
                try:
                    return await self.worker.engine.call(reserve)
                except KvPoolFull:
                    await freed.wait()
        except asyncio.CancelledError:  # the prefill worker left; the engine may reserve yet
            self._give_back(reserved)
            raise
        finally:
            self._waiting_for_pages.discard(freed)
        raise Conflict("the attempt was cancelled")

    def _give_back(self, reserved: list[Adoption]) -> None:
        """Frees what is in the list once all commands posted before this have run."""

        def drop() -> None:
            for adoption in reserved:
                adoption.drop()

        self.worker.engine.post(drop)
        self.worker.pages_freed()

    def pages_freed(self) -> None:
        for freed in self._waiting_for_pages:
            freed.set()

    def _instance(self) -> Instance:
        instance = self.worker.engine.instance
        if instance is None:
            raise Conflict("the instance was unloaded")
        return instance

    async def _take_over(self, attempt: Attempt, incoming: Incoming) -> None:
        """Receives the KV, then lets the engine decode."""
        begin_us = now_us()
        receive = asyncio.get_running_loop().run_in_executor(
            self._threads, incoming.receive, self.worker.engine.write, self.worker.settings.kv_timeout_s
        )
        try:
            trailer = await receive
            self.worker.meters.kv_bytes_received += incoming.num_bytes
            first_tokens = incoming.layout.unpack_trailer(attempt.group_id, trailer)
        except (TorchrelayError, OSError) as error:
            if self.is_running(attempt):
                message = f"the KV stopped coming: {error}"
                self.fail(attempt, pb.RunError(code=pb.RunError.CODE_PREFILL_LOST, message=message))
            return
        if not self.is_running(attempt):
            return
        end_us = now_us()
        attempt.phases.append(pb.MeasuredPhase(name="kv", begin_unix_us=begin_us, end_unix_us=end_us))
        record_span("kv", attempt.start.traceparent, begin_us * 1000, end_us * 1000, num_bytes=incoming.num_bytes)
        going_on = self._follow_on(attempt, first_tokens)
        if going_on:
            await self.worker.engine.call(lambda: incoming.adoption.start(going_on))
            self._incoming.pop(attempt.group_id, None)

    def _follow_on(self, attempt: Attempt, first_tokens: tuple[NewToken, ...]) -> dict[int, int]:
        """The choices that go on after their first token: choice -> that token."""
        going_on: dict[int, int] = {}
        for token in first_tokens:
            if token.choice in attempt.open_choices:
                if attempt.finish_of(token) is None:
                    going_on[token.choice] = token.token_id
                else:
                    attempt.open_choices.discard(token.choice)
        if not attempt.open_choices:
            self.forget(attempt)
        return going_on

    # -- tokens ------------------------------------------------------------------------------------------------------

    def owns(self, attempt: Attempt, token: NewToken) -> bool:
        return token.position > attempt.num_forced(token.choice)

    def drop(self, attempt: Attempt) -> None:
        incoming = self._incoming.pop(attempt.group_id, None)
        if incoming is not None:
            incoming.stop()
            self._give_back([incoming.adoption])
        self.pages_freed()  # its own offer may be among those that wait
        record_span("decode", attempt.start.traceparent, attempt.began_us * 1000, now_us() * 1000)
