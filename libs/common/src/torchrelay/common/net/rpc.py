"""gRPC set-up of all services: servers with health checks and error mapping, channels with keep-alive, TLS by setting.

A ``TorchrelayError`` raised by a servicer becomes its gRPC status, with its code, field and retry time in the trailing
metadata; ``error_from_rpc`` restores it on the client.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from torchrelay.common.errors import Conflict, Overloaded, TorchrelayError, Unavailable, error_class
from torchrelay.common.tls import CLUSTER_NAME, Tls

MAX_MESSAGE_BYTES = 8 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]
# Reconnect to a restarted service within a fraction of a second.
_CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_retries", 0),
]
# Certificates name the cluster, not the peer's address.
_TLS_OPTIONS = [*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", CLUSTER_NAME)]
_CODE, _FIELD, _RETRY = "torchrelay-code", "torchrelay-field", "torchrelay-retry-after-s"


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A lazy, reconnecting channel to ``host:port``. ``tls``: this process's identity; None: plain text."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=_TLS_OPTIONS)


def open_blocking_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """``open_channel`` for programs without an event loop."""
    if tls is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, tls.channel_credentials(), options=_TLS_OPTIONS)


def error_from_rpc(error: grpc.aio.AioRpcError) -> TorchrelayError:
    """The error raised by the server, or ``Unavailable`` when it could not be reached."""
    trailing = {str(key): value for key, value in (error.trailing_metadata() or ())}
    message = error.details() or "the call failed without a message"
    code, field = trailing.get(_CODE), trailing.get(_FIELD)
    if code is None:
        return Unavailable(message) if error.code() == grpc.StatusCode.UNAVAILABLE else TorchrelayError(message)
    kind = error_class(str(code))
    if issubclass(kind, Overloaded):
        return kind(message, field=_text(field), retry_after_s=float(str(trailing.get(_RETRY, "1"))))
    return kind(message, field=_text(field))


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


class _ErrorMapping(grpc.aio.ServerInterceptor):
    """Turns a ``TorchrelayError`` raised by any servicer into its status and trailing metadata."""

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
        mapped = (_mapped_stream if handler.response_streaming else _mapped)(getattr(handler, kind))
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(mapped, handler.request_deserializer, handler.response_serializer)


def _mapped(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def mapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await call(request, context)
        except TorchrelayError as error:
            await _abort(context, error)

    return mapped


def _mapped_stream(call: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def mapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            replies = call(request, context)
            if inspect.isawaitable(replies):  # a servicer that writes to the context
                await replies
                return
            async for reply in replies:
                yield reply
        except TorchrelayError as error:
            await _abort(context, error)

    return mapped


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: TorchrelayError) -> None:
    trailing = [(_CODE, error.code)]
    if error.field:
        trailing.append((_FIELD, error.field))
    if isinstance(error, Overloaded):
        trailing.append((_RETRY, str(error.retry_after_s)))
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(trailing))


class RpcServer:
    """A gRPC server with health checks. With ``tls`` it serves only peers of the same cluster."""

    def __init__(self, host: str, port: int = 0, tls: Tls | None = None) -> None:
        self.server = grpc.aio.server(interceptors=(_ErrorMapping(),), options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        address = f"{host}:{port}"
        try:
            self.port = self._bind(address, tls)
        except RuntimeError as error:  # gRPC does not say why
            raise Conflict(
                f"cannot listen on {address}: another process does, or it is not an address of this machine",
                field="port",
            ) from error

    def _bind(self, address: str, tls: Tls | None) -> int:
        if tls is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, tls.server_credentials())

    async def start(self) -> None:
        """Starts serving and reports it to health checks."""
        await self.server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Reports not serving, lets running calls finish within ``grace_s``, then closes."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
