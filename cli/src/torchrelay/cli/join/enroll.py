"""The credentials of this machine's nodes, from the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from torchrelay.cli.errors import CliError
from torchrelay.cli.join_file import JoinFile
from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import scheduler_pb2, scheduler_pb2_grpc

_TIMEOUT_S = 5.0
_RETRY_S = 0.5
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def enroll(
    cluster: JoinFile, tls: Tls | None, store_id: str, worker_id: str, on_away: Callable[[str], None]
) -> scheduler_pb2.EnrollReply:
    """Waits for a scheduler that does not answer, after ``on_away(its address)``. Raises ``CliError`` if it refuses."""
    request = scheduler_pb2.EnrollRequest(join_token=cluster.token, store_id=store_id, worker_id=worker_id)
    async with open_channel(cluster.scheduler, tls, "", Caller.SCHEDULER) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        is_told = False
        while True:
            try:
                return await stub.Enroll(request, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AWAY:
                    message = f"the scheduler at {cluster.scheduler} refuses {worker_id or store_id}: {error.details()}"
                    raise CliError(message, "copy the join file again from the home of the running `up`") from error
            if not is_told:
                on_away(cluster.scheduler)
                is_told = True
            await asyncio.sleep(_RETRY_S)
