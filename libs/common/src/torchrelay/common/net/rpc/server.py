"""gRPC servers with health checks, error mapping and TLS by setting.

A server with a ``CallCheck`` serves each method to those alone who may call it; health checks are open to all.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchrelay.common.errors import Conflict, TorchrelayError
from torchrelay.common.host.addresses import join_address
from torchrelay.common.identity.callers import CallCheck, MethodCallers
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.channels import TOKEN
from torchrelay.common.net.rpc.errors import status_of, text_of
from torchrelay.common.net.rpc.health import HEALTH_PREFIX, Faults, HealthServicer, check_alone, no_fault
from torchrelay.common.net.rpc.options import OPTIONS

Check: TypeAlias = Callable[[str, grpc.aio.ServicerContext[Any, Any]], None]
_Check: TypeAlias = Callable[[grpc.aio.ServicerContext[Any, Any]], None]  # of one method


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Runs ``check`` with the method before each call, and maps a ``TorchrelayError`` to its status and metadata."""

    def __init__(self, check: Check) -> None:
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        kinds = ("unary_unary", "stream_unary", "unary_stream", "stream_stream")
        kind = next(kind for kind in kinds if getattr(handler, kind))
        check = partial(self._check, handler_call_details.method)
        mapped = (_mapped_stream if handler.response_streaming else _mapped)(getattr(handler, kind), check)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(mapped, handler.request_deserializer, handler.response_serializer)


def _mapped(call: Callable[..., Awaitable[Any]], check: _Check) -> Callable[..., Awaitable[Any]]:
    async def mapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            check(context)
            return await call(request, context)
        except TorchrelayError as error:
            status = status_of(error)
        await context.abort(*status)

    return mapped


def _mapped_stream(call: Callable[..., Any], check: _Check) -> Callable[..., AsyncIterator[Any]]:
    async def mapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            check(context)
            replies = call(request, context)
            if inspect.isawaitable(replies):  # a servicer that writes to the context
                await replies
                return
            async for reply in replies:
                yield reply
            return
        except TorchrelayError as error:
            status = status_of(error)
        await context.abort(*status)

    return mapped


class RpcServer:
    """A gRPC server with health checks. With ``tls`` it serves only peers of the same cluster.

    ``node_key``: of a node that checks who calls; None: it serves everybody. ``fault`` is asked at each health check:
    why the service cannot serve, empty if it can. ``options``: of grpcio, in place of those of ``OPTIONS``.
    ``is_public``: any client may check its health, and none may watch it.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        tls: Tls | None = None,
        node_key: bytes | None = None,
        fault: Faults = no_fault,
        options: Mapping[str, int] = MappingProxyType({}),
        is_public: bool = False,
    ) -> None:
        self._call_check = None if node_key is None else CallCheck(node_key, is_tls=tls is not None)
        self._health = HealthServicer(fault)
        every_option = list((dict(OPTIONS) | dict(options)).items())
        self.server = grpc.aio.server(interceptors=(CallInterceptor(self._check_caller),), options=every_option)
        if is_public:
            self.server.add_generic_rpc_handlers((check_alone(self._health),))
        else:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self.port = self._bind(join_address(host, port), tls)

    def _check_caller(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._call_check is None or method.startswith(HEALTH_PREFIX):
            return
        token = next((value for key, value in context.invocation_metadata() or () if key == TOKEN), "")
        names = context.auth_context().get("x509_subject_alternative_name", ())
        self._call_check.check(method, text_of(token) or "", [name.decode(errors="replace") for name in names])

    def _bind(self, address: str, tls: Tls | None) -> int:
        try:
            if tls is None:
                return self.server.add_insecure_port(address)
            return self.server.add_secure_port(address, tls.server_credentials())
        except RuntimeError as error:  # which does not say why
            message = f"cannot listen on {address}: another process does, or it is not an address of this machine"
            raise Conflict(message, field="port") from error

    def allow(self, methods: MethodCallers) -> None:
        """Lets these callers call these methods; without it, a node that checks serves nobody."""
        if self._call_check is not None:
            self._call_check.allow(methods)

    async def start(self) -> None:
        """Starts serving and reports it to health checks."""
        await self.server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def set_serving(self, service: str, is_serving: bool) -> None:
        """Sets what health checks of this service say."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(service, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Reports not serving, lets running calls finish within ``grace_s``, then closes."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
