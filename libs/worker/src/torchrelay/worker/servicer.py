"""The Worker RPCs: the scheduler's commands to the slot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchrelay.common.identity.callers import Caller, MethodCallers
from torchrelay.control.v1 import reports_pb2, worker_pb2, worker_pb2_grpc
from torchrelay.worker.reporter import Reporter
from torchrelay.worker.role import MIN_BEAT_S
from torchrelay.worker.slot.slot import HostedInstance
from torchrelay.worker.worker import Worker

Context = grpc.aio.ServicerContext[Any, Any]
CALLERS: MethodCallers = {
    f"/torchrelay.control.v1.Worker/{method}": {Caller.SCHEDULER}
    for method in ("Load", "Unload", "SetRoles", "WatchSlot")
}


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Checks the epoch of every command and passes it to the worker.

    A watch of a lower epoch ends once a report has told its scheduler the higher one.
    """

    def __init__(self, worker: Worker, reporter: Reporter) -> None:
        self._worker, self._reporter = worker, reporter

    async def Load(self, request: worker_pb2.LoadRequest, context: Context) -> worker_pb2.LoadReply:
        self._worker.slot.epoch.check(request.epoch)
        hosted = HostedInstance(request.instance_id, request.version, list(request.roles))
        if self._worker.slot.hosted is None or self._worker.slot.hosted.instance_id != request.instance_id:
            await self._worker.load(hosted, request.traceparent)
        return worker_pb2.LoadReply()

    async def Unload(self, request: worker_pb2.UnloadRequest, context: Context) -> worker_pb2.UnloadReply:
        self._worker.slot.epoch.check(request.epoch)
        await self._worker.unload(request.instance_id, request.drain_s)
        return worker_pb2.UnloadReply()

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, context: Context) -> worker_pb2.SetRolesReply:
        self._worker.slot.epoch.check(request.epoch)
        await self._worker.set_roles(request.instance_id, list(request.roles))
        return worker_pb2.SetRolesReply()

    async def WatchSlot(
        self, request: worker_pb2.WatchSlotRequest, context: Context
    ) -> AsyncIterator[reports_pb2.WorkerReport]:
        fence = self._worker.slot.epoch
        fence.observe(request.epoch)
        has_reported = False
        every_s = max(request.beat_every_s, MIN_BEAT_S) if request.beat_every_s > 0 else None
        async for has_changed in self._worker.slot.changes(every_s):
            if has_reported:  # not right after the report: gRPC may drop a message that the status follows at once
                fence.check(request.epoch)
            has_reported = 0 < request.epoch < fence.highest
            yield self._reporter.report() if has_changed else self._reporter.beat()
