"""The prefill role: runs prompts, delivers first tokens or embeddings, and sends KV to decode workers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, TorchrelayError
from torchrelay.common.identity.callers import Caller, MethodCallers
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.common.process.telemetry import get_logger, record_span
from torchrelay.common.quantities import format_count
from torchrelay.control.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.engine.core import (
    Embedding,
    Finish,
    GroupSpec,
    KvBlock,
    NewToken,
    PromptLogprobs,
    PromptProgress,
)
from torchrelay.engine.kv.layout import context_digests
from torchrelay.prefill.byte_budget import ByteBudget
from torchrelay.prefill.kv_sender import KvSender, kv_offer
from torchrelay.prefill.prompt_moves import OFFER_S, PromptReceiver, RecalledPrompts, check_ticket
from torchrelay.worker.attempts.attempt import NON_FINITE_EMBEDDING_ERROR, Attempt, dispatch_outputs, group_id_of
from torchrelay.worker.attempts.hosted_adapters import READ_TIMEOUT_S
from torchrelay.worker.role import RoleContext, WorkerRole
from torchrelay.worker.slot.slot import LOADING

log = get_logger(__name__)
RECALL_DELAY_S = 0.5  # a recall may reach the decode worker by this much earlier than this worker
CALLERS: MethodCallers = {
    "/torchrelay.control.v1.Prefill/Run": {Caller.GATEWAY},
    "/torchrelay.control.v1.Prefill/OfferPrompt": {Caller.WORKER},
}


class PrefillRole(WorkerRole, prefill_pb2_grpc.PrefillServicer):  # type: ignore[misc]  # Run writes to its context
    """Delivers the first new token of every choice; the decode role delivers the others."""

    number = types_pb2.ROLE_PREFILL

    def __init__(self, worker: RoleContext) -> None:
        super().__init__(worker)
        self._kv_senders: dict[str, KvSender] = {}
        self._budget = ByteBudget(worker.settings.unsent_kv_bytes)
        self._measured: set[str] = set()  # attempts whose first token has been delivered
        self._recalled = RecalledPrompts(worker, self._budget)
        self._receivers: dict[str, PromptReceiver] = {}  # by group id
        self._threads = ThreadPoolExecutor(worker.settings.max_incoming, thread_name_prefix="prompt")
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}  # by address and token of a worker

    @property
    def num_kv_transfers(self) -> int:
        return len(self._kv_senders)

    @property
    def _pack_id(self) -> str:
        hosted = self.worker.slot.hosted
        return hosted.version.pack_id if hosted else ""

    def register(self, server: RpcServer) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server.server)
        server.allow(CALLERS)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._recalled.close()
            for receiver in self._receivers.values():
                receiver.stop()
            await asyncio.to_thread(self._threads.shutdown)
            for channel in self._channels.values():
                await channel.close()

    async def begin(self, attempt: Attempt) -> None:
        group = attempt.group()
        if group.pooling is not None:
            await self._submit(attempt, group, None)
        elif attempt.start.decode.worker_id == self.worker.settings.worker_id:
            await self._begin_local(attempt, group)
        else:
            await self._begin_remote(attempt, group)

    async def _begin_local(self, attempt: Attempt, group: GroupSpec) -> None:
        """Starts an attempt that this worker also decodes: the pages stay in place and change roles."""
        decode = self.worker.role(types_pb2.ROLE_DECODE)
        if decode is None:
            raise Conflict("this worker does not play the decode role", field="decode")
        decoding = await decode.wait_for_start(group.group_id)
        if not self.is_running(attempt):
            return
        if not decode.is_running(decoding):
            raise Conflict("the decode role ended the attempt")
        await self._submit(attempt, group, None)

    async def _begin_remote(self, attempt: Attempt, group: GroupSpec) -> None:
        layout = self.worker.engine.require_relay_instance().kv_layout(group)
        await self._budget.acquire(layout.num_kv_bytes)
        if not self.is_running(attempt):
            self._budget.release(layout.num_kv_bytes)
            return
        kv_sender = KvSender(attempt, layout)
        self._kv_senders[attempt.group_id] = kv_sender
        self.worker.buffers[attempt.group_id] = kv_sender.buffer
        self.spawn(attempt, self._send_kv(kv_sender), "kv")
        await self._submit(attempt, group, kv_sender.publish)

    async def _submit(self, attempt: Attempt, group: GroupSpec, on_kv: Callable[[KvBlock], None] | None) -> None:
        """Continues a prompt that another worker has begun, if the engine can, or begins it."""
        engine = self.worker.engine
        if attempt.start.HasField("prompt_source") and engine.relay_instance is not None:
            await self._continue(attempt, group, on_kv)
        elif on_kv is None:
            await engine.call(lambda: engine.require_instance().prefill(group))
        else:
            await engine.call(lambda: engine.require_relay_instance().prefill(group, on_kv))

    async def _continue(self, attempt: Attempt, group: GroupSpec, on_kv: Callable[[KvBlock], None] | None) -> None:
        """Imports what another worker has computed of the prompt, if it can, and computes the rest."""
        receiver = PromptReceiver(self.worker.engine, group, self._pack_id, on_kv)
        self._receivers[attempt.group_id] = receiver
        source, began_s = attempt.start.prompt_source, time.monotonic()
        await receiver.reserve()
        # Its worker computes more layers until this worker can almost begin.
        await asyncio.sleep(max(source.wait_ms / 1000 - (time.monotonic() - began_s), 0.0))
        if not self.is_running(attempt):
            return
        begin_us = now_unix_us()
        boundary = await self._import(attempt, receiver)
        self._receivers.pop(attempt.group_id, None)
        if not self.is_running(attempt):
            return
        if not boundary:
            await receiver.start_over()
            return
        detail = f"{format_count(boundary, 'layer')} computed by {source.worker.worker_id}"
        phase = types_pb2.Phase(name="import", begin_unix_us=begin_us, end_unix_us=now_unix_us(), detail=detail)
        attempt.phases.append(phase)
        await receiver.start()

    async def _import(self, attempt: Attempt, receiver: PromptReceiver) -> int:
        """Receives the prompt from its source; returns its boundary, 0 if nothing of it can be used."""
        source = attempt.start.prompt_source
        try:
            stub = prefill_pb2_grpc.PrefillStub(self._channel(source.worker))
            request = prefill_pb2.PromptRequest(key=source.key, ticket=source.ticket)
            offer = await stub.OfferPrompt(request, timeout=OFFER_S)
            return await receiver.receive(offer, self.worker, self._threads)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                self._drop_channel(source.worker)
            why = error.details()
        except TorchrelayError as error:
            why = error.message
        except Exception as error:  # of a copy in the engine: the prompt can still be computed
            log.error("import_broke", group_id=attempt.group_id, exc_info=error)
            why = str(error)
        log.info("prompt_not_continued", group_id=attempt.group_id, worker=source.worker.worker_id, why=why)
        return 0

    def recall(self, attempt: Attempt) -> None:
        if self.worker.engine.relay_instance is not None:
            self._recalled.keep(attempt.group_id)
        super().recall(attempt)

    def prefilled(self, group_ids: Iterable[str]) -> None:
        self._recalled.drop_prefilled(group_ids)

    def keeps_prompt(self, group_id: str) -> bool:
        return group_id in self.attempts or group_id in self._recalled

    async def OfferPrompt(
        self, request: prefill_pb2.PromptRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.KvOffer:
        check_ticket(request, self.worker.receiver)
        group_id, pack_id = group_id_of(request.key), self._pack_id
        if (attempt := self.attempts.get(group_id)) is not None:  # the gateway's recall is still on its way
            self.recall(attempt)
        exported = await self._recalled.export(group_id, request.ticket.buffer_id)
        return kv_offer(
            self.worker,
            exported.layout,
            request.ticket,
            pack_id,
            key=request.key,
            boundary=exported.layout.shape.num_layers,
            context_digests=context_digests(exported.spec),
        )

    async def _send_kv(self, kv_sender: KvSender) -> None:
        """Offers the KV and keeps it until the decode worker has received all of it."""
        attempt, target = kv_sender.attempt, kv_sender.attempt.start.decode
        worker, start = self.worker, attempt.start
        reads_s = READ_TIMEOUT_S if attempt.start.HasField("adapter") else 0.0  # there, before it takes the offer
        offer = kv_offer(
            worker,
            kv_sender.layout,
            start.kv_ticket,
            self._pack_id,
            key=start.key,
            instance_id=start.decode.instance_id,
        )
        try:
            decode = decode_pb2_grpc.DecodeStub(self._channel(target))
            await decode.Receive(offer, timeout=worker.settings.kv_timeout_s + reads_s)
        except grpc.aio.AioRpcError as error:
            cause, lost_worker = error_from_rpc(error), ""
            # It may have ended the attempt because of a recall, which lets a loading worker keep the prompt.
            if isinstance(cause, Conflict) and self.worker.slot.state == LOADING:
                await asyncio.sleep(RECALL_DELAY_S)
            message = f"the decode worker {target.worker_id} refused the KV: {cause.message}"
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                self._drop_channel(target)
                lost_worker = target.worker_id
            code = pb.RunError.CODE_DECODE_LOST
            self.fail(attempt, pb.RunError(code=code, message=message, lost_worker=lost_worker))
            return
        await kv_sender.complete.wait()
        try:
            async with asyncio.timeout(self.worker.settings.kv_timeout_s):
                await kv_sender.received.wait()
        except TimeoutError:
            log.warning("kv_not_taken", group_id=attempt.group_id, decode_worker=target.worker_id)
        if self.forget(attempt):
            self.worker.usage.hand_off(attempt)

    def _drop_channel(self, target: types_pb2.WorkerRef) -> None:
        """Closes the channel to a lost worker, which rarely returns at the same address."""
        channel = self._channels.pop((target.grpc_address, target.worker_token), None)
        if channel is not None:  # other offers may still wait for a reply, up to their timeout
            grace_s = self.worker.settings.kv_timeout_s
            self.worker.spawn(channel.close(grace_s), f"channel to {target.grpc_address}")

    def _channel(self, target: types_pb2.WorkerRef) -> grpc.aio.Channel:
        key = target.grpc_address, target.worker_token
        channel = self._channels.get(key)
        if channel is None:
            channel = open_channel(target.grpc_address, self.worker.tls, target.worker_token, Caller.WORKER)
            self._channels[key] = channel
        return channel

    def delivers(self, attempt: Attempt, token: NewToken) -> bool:
        return token.position == attempt.num_forced(token.choice)

    def advance_prompts(self, prompts: Sequence[PromptProgress]) -> None:
        """Tells the gateways the progress of long prompts, by which a request is billed that is cancelled meanwhile."""
        outputs = []
        for progress in prompts:
            attempt = self.attempts.get(progress.group_id)
            if attempt is not None and attempt.open_choices:
                output = attempt.prompt_output(progress)
                self.worker.usage.advance(attempt, output)
                outputs.append((attempt.outbox, output))
        dispatch_outputs(outputs)

    def deliver_prompt_logprobs(self, scores: Sequence[PromptLogprobs]) -> None:
        attempts = [(self.attempts.get(each.group_id), each) for each in scores]
        dispatch_outputs(
            (attempt.outbox, attempt.prompt_logprobs_output(each))
            for attempt, each in attempts
            if attempt is not None and attempt.open_choices
        )

    def deliver_embeddings(self, embeddings: Sequence[Embedding]) -> None:
        outputs = []
        for embedding in embeddings:
            attempt = self.attempts.get(embedding.group_id)
            if attempt is None:
                continue
            if not embedding.values:
                self.fail(attempt, NON_FINITE_EMBEDDING_ERROR)
                continue
            self.record_phases(attempt)
            output = attempt.embedding_output(embedding)
            self.worker.usage.advance(attempt, output)
            outputs.append((attempt.outbox, output))
            attempt.open_choices.clear()
            self.forget(attempt)
        dispatch_outputs(outputs)

    def record_phases(self, attempt: Attempt) -> None:
        if attempt.group_id not in self._measured:  # the first token of the attempt
            self._measured.add(attempt.group_id)
            end_us = now_unix_us()
            phase = types_pb2.Phase(name="prefill", begin_unix_us=attempt.began_us, end_unix_us=end_us)
            attempt.phases.append(phase)
            record_span("prefill.run", attempt.start.traceparent, attempt.began_us * 1000, end_us * 1000)

    def on_delivered(self, attempt: Attempt, token: NewToken, finish: Finish | None) -> None:
        kv_sender = self._kv_senders.get(attempt.group_id)
        if kv_sender is not None:
            kv_sender.add_first_token(dataclasses.replace(token, finish=finish))
        elif finish is None:  # decoded here, by the decode role
            attempt.open_choices.discard(token.choice)
            if not attempt.open_choices:
                self.forget(attempt)

    def is_done(self, attempt: Attempt) -> bool:
        return attempt.group_id not in self._kv_senders  # otherwise it ends once the KV is received

    def drop(self, attempt: Attempt) -> None:
        self.worker.buffers.pop(attempt.group_id, None)
        self._measured.discard(attempt.group_id)
        if (receiver := self._receivers.pop(attempt.group_id, None)) is not None:
            receiver.stop()
        kv_sender = self._kv_senders.pop(attempt.group_id, None)
        if kv_sender is not None:
            kv_sender.abandon()
            self._budget.release(kv_sender.layout.num_kv_bytes)
