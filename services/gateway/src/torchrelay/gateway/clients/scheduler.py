"""Client of the scheduler for the REST API: slot sizes and explanations of requests."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.gateway.clients.endpoint import scheduler_endpoint
from torchrelay.gateway.core import ANY_ENGINE

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of the present workers."""

    largest_bytes: int = 0  # of weights that the largest known slot can hold; 0: none is known
    engines: frozenset[str] = frozenset()  # empty: none is known

    def check_engine(self, engine: str) -> None:
        """Raises ``InvalidRequest`` if no worker has the engine that a model names, unless no worker is known."""
        if engine != ANY_ENGINE and self.engines and engine not in self.engines:
            offered = " and ".join(sorted(self.engines))
            raise InvalidRequest(f"no worker has the engine {engine}; the workers have {offered}", field="engine")


class SchedulerClient:
    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = SchedulerStub(channel)
        self._endpoint = scheduler_endpoint(address)

    async def slots(self, timeout_s: float = 2.0) -> Slots:
        """The slots of the present workers; none if the scheduler is unreachable."""
        call = self._stub.WatchCluster(scheduler_pb2.WatchClusterRequest(), timeout=timeout_s)
        try:
            async for view in call:
                engines = frozenset(worker.capabilities.engine or "torchrelay" for worker in view.workers)
                return Slots(view.largest_slot_bytes, engines)
        except grpc.aio.AioRpcError as error:
            log.info("slots_unknown", error=self._endpoint.error(error).message)
        finally:
            call.cancel()
        return Slots()

    async def explain(self, request_id: str, timeout_s: float = 5.0) -> scheduler_pb2.ExplainReply:
        """Raises the scheduler's errors (``NotFound`` for a request too old), or ``Unavailable``."""
        with self._endpoint.mapped_errors():
            return await self._stub.Explain(scheduler_pb2.ExplainRequest(request_id=request_id), timeout=timeout_s)
