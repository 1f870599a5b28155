"""Health checks over gRPC that ask the service itself, each time, and say why it cannot serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2

HEALTH_PREFIX = f"/{health.SERVICE_NAME}/"
_FAULT = "torchrelay-fault"
Faults: TypeAlias = Callable[[], Awaitable[str]]


def fault_in(trailing: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Why a health check was answered with NOT_SERVING; empty if the server does not say."""
    return next((str(value) for key, value in trailing or () if key == _FAULT), "")


class HealthServicer(health.aio.HealthServicer):
    """Health checks that ask the service itself, each time."""

    def __init__(self, fault: Faults) -> None:
        super().__init__()
        self._fault = fault

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if fault := await self._fault():
            context.set_trailing_metadata(((_FAULT, fault.encode("ascii", "replace").decode()),))
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        return await super().Check(request, context)


def check_alone(servicer: HealthServicer) -> grpc.GenericRpcHandler:
    """Health checks for clients without a key: they read no message, as there is only this service to check, and cannot
    be watched, as a watch never ends.
    """

    async def check(_messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await servicer.Check(health_pb2.HealthCheckRequest(), context)

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(
        check, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": handler})


async def no_fault() -> str:
    return ""
