"""The public gRPC server: health checks, error mapping, and a ``PublicPort`` in front of grpcio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from torchrelay.common.errors import InvalidRequest, Unavailable
from torchrelay.common.net.rpc.health import Faults, HealthServicer, no_fault
from torchrelay.common.net.rpc.server import CallInterceptor, listen
from torchrelay.gateway.edge.call_messages import CallMessages
from torchrelay.gateway.edge.frame_limits import STREAM_HEADER
from torchrelay.gateway.edge.grpc_limits import GrpcLimits
from torchrelay.gateway.edge.public_port import PublicPort

_Context = grpc.aio.ServicerContext[Any, Any]
_peer: ContextVar[tuple[PublicPort, str]] = ContextVar("peer")
_messages: ContextVar[CallMessages] = ContextVar("messages")


def show_key(tenant_id: str) -> None:
    """Notes that the current call has shown a valid key of the tenant, so that its connection is kept."""
    port, peer = _peer.get()
    port.show_key(peer, tenant_id)


async def message_begun() -> None:
    """Waits for the first byte of the current call's next message, or for the end of its messages."""
    messages, begun = _messages.get(), asyncio.Event()
    messages.on_begun = begun.set
    if not messages.has_begun:
        await begun.wait()


def note_message() -> None:
    """Notes that the current call has read a message."""
    _messages.get().note_read()


class PublicGrpcServer:
    """A gRPC server for any client, within ``limits`` and without TLS.

    ``fault`` is called at each health check; it returns why the service cannot serve, empty if it can. Health cannot be
    watched: such a call would need no key and never end.
    """

    def __init__(self, host: str, port: int, limits: GrpcLimits, fault: Faults = no_fault) -> None:
        self._health = HealthServicer(fault)
        with ExitStack() as undo:
            self._public = PublicPort(undo.enter_context(listen(host, port)), limits)
            undo.callback(self._public.dispose)
            self.server = grpc.aio.server(interceptors=(CallInterceptor(self._note_call),), options=limits.options)
            self.server.add_generic_rpc_handlers((_health_handler(self._health),))
            try:
                self.server.add_insecure_port(self._public.address)
            except RuntimeError as error:
                message = f"gRPC cannot listen on {self._public.address}, where its public port reaches it"
                raise Unavailable(message) from error
            self._public.hide_address()
            undo.pop_all()
        self.port = self._public.port

    def _note_call(self, _method: str, context: _Context) -> None:
        peer = context.peer()
        numbers = [value for name, value in context.invocation_metadata() or () if name == STREAM_HEADER]
        try:
            stream = int(numbers[-1])  # the port's is behind those of the client
        except (IndexError, ValueError):  # the client's last header has no end, so that the port's is a part of it
            raise InvalidRequest("the headers of the call are malformed") from None
        _peer.set((self._public, peer))
        _messages.set(self._public.messages(peer, stream))

        def end(_context: object) -> None:
            self._public.end_call(peer, stream)

        context.add_done_callback(end)  # type: ignore[arg-type]  # the stubs want a class of their own

    async def start(self) -> None:
        """Starts serving and reports it to health checks."""
        await self.server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._public.start()

    async def stop(self, grace_s: float) -> None:
        """Reports not serving, lets running calls finish within ``grace_s``, then closes."""
        await self._public.stop_accepting()
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
        await self._public.close()


def _health_handler(servicer: HealthServicer) -> grpc.GenericRpcHandler:
    """Health checks that do not wait for their message, since there is only this service to check."""

    async def check(_messages: AsyncIterator[bytes], context: _Context) -> Any:
        return await servicer.Check(health_pb2.HealthCheckRequest(), context)

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(
        check, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": handler})
