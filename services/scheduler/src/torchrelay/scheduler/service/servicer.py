"""The RPCs of the scheduler."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

from torchrelay.common.errors import InvalidRequest, NotFound, TorchrelayError
from torchrelay.common.identity.callers import ANYONE, Caller, MethodCallers, call_token
from torchrelay.common.identity.join_token import check_join_token
from torchrelay.common.identity.keys import derive_compiled_key, derive_node_key
from torchrelay.common.process.settings import NODE_ID
from torchrelay.control.v1 import scheduler_pb2, scheduler_pb2_grpc
from torchrelay.scheduler.policy.explain import MAX_REQUESTS
from torchrelay.scheduler.policy.handlers.views import worth_lines
from torchrelay.scheduler.policy.inputs import FirstToken, GatewayChanged, LauncherReported, ModelDeleted, Withdraw
from torchrelay.scheduler.service import converters
from torchrelay.scheduler.service.admit_streams import AdmitStream
from torchrelay.scheduler.service.controller import CallContext, Controller
from torchrelay.scheduler.service.history import EventReader
from torchrelay.scheduler.service.views import ClusterViews, bottleneck_line

_MAX_PER_TURN = 32  # commands of a stream before other streams get their turn; an admission takes some 0.2 ms
_MAX_WAITS_CHARS = 500

_SERVICE = "/torchrelay.control.v1.Scheduler"
CALLERS: MethodCallers = {
    f"{_SERVICE}/Admit": {Caller.GATEWAY},
    f"{_SERVICE}/Explain": {Caller.GATEWAY},
    f"{_SERVICE}/WatchCluster": {Caller.GATEWAY, Caller.CLI},
    f"{_SERVICE}/WatchEvents": {Caller.GATEWAY},
    f"{_SERVICE}/Enroll": ANYONE,
    f"{_SERVICE}/ReportLauncher": {Caller.CLI},
}


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    def __init__(self, controller: Controller, event_reader: EventReader, cluster_key: bytes) -> None:
        self._controller = controller
        self._views = ClusterViews(controller)
        self._event_reader = event_reader
        self._cluster_key = cluster_key

    async def Admit(
        self, request_iterator: AsyncIterator[scheduler_pb2.AdmitCommands], context: CallContext
    ) -> AsyncIterator[scheduler_pb2.AdmitEvents]:
        """Reads commands while sending events; when either ends, so does the stream."""
        stream = self._controller.streams.open()
        reading = asyncio.create_task(self._read(request_iterator, stream), name="admit-read")
        # A broken stream may leave this generator suspended: cleaning up must not wait until it is collected.
        context.add_done_callback(lambda _: self._leave(stream, reading))
        try:
            await context.send_initial_metadata(())  # the gateway considers itself connected from here
            async for events in stream.events():
                yield events
            if reading.done() and not reading.cancelled():
                reading.result()  # our own fault breaks the stream visibly
        finally:
            self._leave(stream, reading)
            await asyncio.wait((reading,))

    async def _read(self, batches: AsyncIterator[scheduler_pb2.AdmitCommands], stream: AdmitStream) -> None:
        try:
            async for batch in batches:
                for number, command in enumerate(batch.commands, 1):
                    self._dispatch_command(command, stream)
                    if number % _MAX_PER_TURN == 0:
                        await asyncio.sleep(0)  # the turn of other streams and reports
                        if stream.is_closed:  # its gateway has a newer stream, on which it repeats its admissions
                            return
        except TorchrelayError as error:
            stream.close(error)
        finally:
            stream.close()

    def _dispatch_command(self, command: scheduler_pb2.AdmitCommand, stream: AdmitStream) -> None:
        kind = command.WhichOneof("command")
        if kind == "hello":
            if stream.gateway_id or not command.hello.gateway_id:
                raise InvalidRequest("a stream must say hello once, with a gateway id", field="hello")
            self._controller.streams.connected(stream, command.hello.gateway_id)
            self._controller.apply(GatewayChanged(stream.gateway_id, is_connected=True))
            stream.beat(command.hello.beat_every_s)
        elif not stream.gateway_id:
            raise InvalidRequest("the first message of a stream must be hello", field="command")
        elif kind == "admit":
            self._controller.admit(stream.gateway_id, command.admit)
        elif kind == "withdraw":
            self._controller.apply(Withdraw(converters.key_from_proto(command.withdraw.key)))
        elif kind == "first_token":
            self._controller.apply(FirstToken(converters.key_from_proto(command.first_token.key)))
        elif kind == "release":
            self._controller.release(command.release)
        elif kind == "minimums":
            self._controller.set_minimums(command.minimums)
        elif kind == "model_deleted":
            self._controller.apply(ModelDeleted(command.model_deleted.model))

    def _leave(self, stream: AdmitStream, reading: asyncio.Task[None]) -> None:
        reading.cancel()
        stream.close()
        if self._controller.streams.disconnected(stream):
            self._controller.apply(GatewayChanged(stream.gateway_id, is_connected=False))

    async def Explain(self, request: scheduler_pb2.ExplainRequest, context: CallContext) -> scheduler_pb2.ExplainReply:
        if not request.request_id:
            decisions = self._controller.explain.model(request.model)
            worth = worth_lines(self._controller.policy.state, request.model, self._controller.clock.now())
            return scheduler_pb2.ExplainReply(
                decisions=map(converters.decision_to_proto, decisions),
                worth=[
                    *bottleneck_line(self._controller, request.model),
                    *(scheduler_pb2.WorthLine(label=line.label, text=line.text) for line in worth),
                ],
            )
        explained = self._controller.explain.request(request.request_id)
        if explained is None:
            kept = f"only requests since the scheduler's start, the last {MAX_REQUESTS:,}, are kept"
            raise NotFound(f"no recent request has the id {request.request_id!r}: {kept}", field="request_id")
        phases, decisions = explained
        return scheduler_pb2.ExplainReply(
            phases=map(converters.phase_to_proto, phases), decisions=map(converters.decision_to_proto, decisions)
        )

    async def WatchCluster(
        self, request: scheduler_pb2.WatchClusterRequest, context: CallContext
    ) -> AsyncIterator[scheduler_pb2.ClusterView]:
        changed = self._controller.watch(context)
        while True:
            changed.clear()
            view, is_current = self._views.latest()
            if not is_current:
                changed.set()
            yield view
            await asyncio.sleep(self._views.every_s)  # bounds the rate
            await changed.wait()

    async def WatchEvents(
        self, request: scheduler_pb2.WatchEventsRequest, context: CallContext
    ) -> AsyncIterator[scheduler_pb2.Event]:
        begin_us, after = request.since_unix_us, request.after_sequence
        async with aclosing(self._event_reader.events(request.kinds, begin_us, after, request.follow)) as events:
            async for event in events:
                yield event

    async def Enroll(self, request: scheduler_pb2.EnrollRequest, context: CallContext) -> scheduler_pb2.EnrollReply:
        return enroll(self._cluster_key, request, time.time())

    async def ReportLauncher(
        self, request: scheduler_pb2.LauncherReport, context: CallContext
    ) -> scheduler_pb2.LauncherReportReply:
        self._controller.apply(LauncherReported(request.waits[:_MAX_WAITS_CHARS]))
        return scheduler_pb2.LauncherReportReply()


def enroll(cluster_key: bytes, request: scheduler_pb2.EnrollRequest, unix_s: float) -> scheduler_pb2.EnrollReply:
    """Derives the credentials of nodes from the cluster key, for a caller whose join token allows these nodes.

    Raises as ``check_join_token``, and ``InvalidRequest`` for an id that no node can have.
    """
    is_worker = bool(request.worker_id)
    for field in ("store_id", "worker_id") if is_worker else ("store_id",):
        node_id = getattr(request, field)
        scope = check_join_token(cluster_key, request.join_token, node_id, unix_s)
        if re.fullmatch(NODE_ID, node_id) is None:
            raise InvalidRequest(f"{node_id!r} is not 1 to 63 letters, digits, hyphens and underscores", field=field)
    store_key = derive_node_key(cluster_key, request.store_id)
    if not is_worker:
        return scheduler_pb2.EnrollReply(node_key=store_key.hex())
    node_key = derive_node_key(cluster_key, request.worker_id).hex()
    return scheduler_pb2.EnrollReply(
        node_key=node_key,
        store_token=call_token(store_key, Caller.WORKER),
        compiled_key=derive_compiled_key(cluster_key, scope).hex(),
    )
