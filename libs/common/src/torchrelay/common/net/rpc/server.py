"""gRPC servers with health checks, error mapping and TLS by setting.

A server with a ``CallCheck`` serves each method only to its allowed callers; health checks are open to all.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchrelay.common.errors import Conflict, TorchrelayError, Unavailable
from torchrelay.common.identity.callers import CallCheck, MethodCallers
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.channels import TOKEN
from torchrelay.common.net.rpc.errors import status_of, text_of
from torchrelay.common.net.rpc.health import HEALTH_PREFIX, Faults, HealthServicer, no_fault, public_health
from torchrelay.common.net.rpc.options import OPTIONS, PublicLimits
from torchrelay.common.net.rpc.public_port import PublicPort


class _CallWrapper(grpc.aio.ServerInterceptor):
    """Checks the caller, and turns a ``TorchrelayError`` raised by any servicer into its status and metadata."""

    def __init__(self, call_check: CallCheck | None, public: PublicPort | None) -> None:
        self._call_check = call_check
        self._public = public

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
        method = handler_call_details.method
        check: _Check | None = None
        if self._call_check is not None and not method.startswith(HEALTH_PREFIX):
            check = partial(_check_caller, self._call_check, method)
        elif self._public is not None:
            check = partial(_note_connection, self._public)
        mapped = (_mapped_stream if handler.response_streaming else _mapped)(getattr(handler, kind), check)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(mapped, handler.request_deserializer, handler.response_serializer)


def _check_caller(call_check: CallCheck, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    token = next((value for key, value in context.invocation_metadata() or () if key == TOKEN), "")
    names = context.auth_context().get("x509_subject_alternative_name", ())
    call_check.check(method, text_of(token) or "", [name.decode(errors="replace") for name in names])


_connection: ContextVar[tuple[PublicPort, grpc.aio.ServicerContext[Any, Any]]] = ContextVar("connection")


def _note_connection(public: PublicPort, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    _connection.set((public, context))


def show_key(tenant_id: str) -> None:
    """Notes that the current call has a valid key of the tenant: clients without keys cannot evict its connection."""
    if (noted := _connection.get(None)) is not None:
        public, context = noted
        public.show_key(context.peer(), tenant_id)


_Check: TypeAlias = Callable[[grpc.aio.ServicerContext[Any, Any]], None]


def _mapped(call: Callable[..., Awaitable[Any]], check: _Check | None) -> Callable[..., Awaitable[Any]]:
    async def mapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if check is not None:
                check(context)
            return await call(request, context)
        except TorchrelayError as error:
            status = status_of(error)
        await context.abort(*status)

    return mapped


def _mapped_stream(call: Callable[..., Any], check: _Check | None) -> Callable[..., AsyncIterator[Any]]:
    async def mapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            if check is not None:
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


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise _cannot_listen(f"{host}:{port}") from error


def _cannot_listen(address: str) -> Conflict:
    message = f"cannot listen on {address}: another process does, or it is not an address of this machine"
    return Conflict(message, field="port")


class RpcServer:
    """A gRPC server with health checks. With ``tls`` it serves only peers of the same cluster.

    ``node_key``: of a node that checks its callers; None: it serves everybody, as the tenants' API does. ``limits``:
    unauthenticated clients reach it, through a ``PublicPort``, without TLS; it offers no watching of its health, which
    would need no key and never end. ``fault`` is called at each health check: why the service cannot serve, empty if it
    can.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        tls: Tls | None = None,
        node_key: bytes | None = None,
        limits: PublicLimits | None = None,
        fault: Faults = no_fault,
    ) -> None:
        self._call_check = None if node_key is None else CallCheck(node_key, is_tls=tls is not None)
        self._health = HealthServicer(fault)
        self._public: PublicPort | None = None
        with ExitStack() as undo:
            if limits is not None:
                self._public = PublicPort(undo.enter_context(_listen(host, port)), limits)
                undo.callback(self._public.dispose)
            options = OPTIONS if limits is None else limits.options
            wrapper = _CallWrapper(self._call_check, self._public)
            self.server = grpc.aio.server(interceptors=(wrapper,), options=options)
            if self._public is None:
                health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
                self.port = self._bind(f"{host}:{port}", tls)
            else:
                self.server.add_generic_rpc_handlers((public_health(self._health),))
                self.port = self._public.port
                self._bind_inner(self._public)
            undo.pop_all()

    def _bind(self, address: str, tls: Tls | None) -> int:
        try:
            if tls is None:
                return self.server.add_insecure_port(address)
            return self.server.add_secure_port(address, tls.server_credentials())
        except RuntimeError as error:  # it does not say why
            raise _cannot_listen(address) from error

    def _bind_inner(self, public: PublicPort) -> None:
        try:
            self.server.add_insecure_port(public.address)
        except RuntimeError as error:
            raise Unavailable(f"gRPC cannot listen on {public.address}, where its public port reaches it") from error
        public.hide_address()

    def allow(self, methods: MethodCallers) -> None:
        """Lets these callers call these methods; without it, a node that checks serves nobody."""
        if self._call_check is not None:
            self._call_check.allow(methods)

    async def start(self) -> None:
        """Starts serving and reports it to health checks."""
        await self.server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        if self._public is not None:
            await self._public.start()

    async def stop(self, grace_s: float = 1.0) -> None:
        """Reports not serving, lets running calls finish within ``grace_s``, then closes."""
        if self._public is not None:
            await self._public.stop_accepting()
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
        if self._public is not None:
            await self._public.close()  # raises the error that stopped it from accepting, if any
