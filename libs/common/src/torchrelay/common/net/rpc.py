"""gRPC set-up of all services: servers with health checks and error mapping, channels with keep-alive, TLS by setting.

A ``TorchrelayError`` raised by a servicer becomes its gRPC status, with its code, field and retry time in the trailing
metadata; ``error_from_rpc`` restores it on the client.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from torchrelay.common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TorchrelayError,
    Unavailable,
    error_class,
)
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
_BINARY_FIELD = "torchrelay-field-bin"  # of a field that is not ASCII; gRPC carries binary metadata under such names
# Metadata above 8 KiB ends a call without its cause. Both are cut where a tenant's names make them longer.
_MAX_FIELD_BYTES, _MAX_MESSAGE_CHARS = 1024, 1024
_METADATA_BYTES, _LOOKAHEAD_BYTES = 8 << 10, 64 << 10
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class PublicLimits:
    """Of a server that strangers reach. ``connections`` counts established ones and those that are being made."""

    connections: int
    streams: int  # calls at once on one connection; a client lets further ones wait
    message_bytes: int
    head_s: float  # for a connection's first frames, and for the message of a health check
    idle_s: float  # a connection without a call is closed

    @property
    def options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.server_handshake_timeout_ms", int(self.head_s * 1000)),
            ("grpc.http2.settings_timeout", int(self.head_s * 1000)),
            ("grpc.max_connection_idle_ms", int(self.idle_s * 1000)),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES),
            # What a client may send before its message is asked for. Probing for bandwidth would raise it to megabytes.
            ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
            ("grpc.http2.bdp_probe", 0),
        ]


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
    code, field = trailing.get(_CODE), trailing.get(_FIELD) or trailing.get(_BINARY_FIELD)
    if code is None:
        return Unavailable(message) if error.code() == grpc.StatusCode.UNAVAILABLE else TorchrelayError(message)
    kind = error_class(str(code))
    if issubclass(kind, Overloaded):
        return kind(message, field=_text(field), retry_after_s=float(str(trailing.get(_RETRY, "1"))))
    return kind(message, field=_text(field))


async def first_message(messages: AsyncIterator[M], timeout_s: float) -> M:
    """The message of a call whose client sends one. Raises ``DeadlineExceeded``, or ``InvalidRequest`` without one."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(aiter(messages))
    except TimeoutError:
        raise DeadlineExceeded(f"the message did not arrive within {timeout_s:g} s") from None
    except StopAsyncIteration:
        raise InvalidRequest("the call has no message") from None


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="ignore") if isinstance(value, bytes) else value


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
            status = _status_of(error)
        await context.abort(*status)

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
            return
        except TorchrelayError as error:
            status = _status_of(error)
        await context.abort(*status)

    return mapped


def _status_of(error: TorchrelayError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """The arguments of ``abort``, which is called when the error is gone: gRPC keeps what abort raises, and with it the
    error's frames and the request in them, until the next collection of garbage.
    """
    trailing: list[tuple[str, str | bytes]] = [(_CODE, error.code)]
    if error.field:
        field = error.field.encode(errors="replace")[:_MAX_FIELD_BYTES]
        is_plain = error.field.isascii() and error.field.isprintable()
        trailing.append((_FIELD, field.decode()) if is_plain else (_BINARY_FIELD, field))
    if isinstance(error, Overloaded):
        trailing.append((_RETRY, str(error.retry_after_s)))
    return grpc.StatusCode[error.grpc_status], error.message[:_MAX_MESSAGE_CHARS], tuple(trailing)


class RpcServer:
    """A gRPC server with health checks. With ``tls`` it serves only peers of the same cluster.

    ``limits``: strangers reach it. Then a health check must be asked each time: watching needs no key and never ends.
    """

    def __init__(self, host: str, port: int = 0, tls: Tls | None = None, limits: PublicLimits | None = None) -> None:
        options = _OPTIONS if limits is None else [*_OPTIONS, *limits.options]
        self.server = grpc.aio.server(interceptors=(_ErrorMapping(),), options=options)
        self._health = health.aio.HealthServicer()
        if limits is None:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        else:
            self.server.add_generic_rpc_handlers((_public_health(self._health, limits.head_s),))
        address = f"{host}:{port}"
        self.port = (
            self.server.add_insecure_port(address)
            if tls is None
            else self.server.add_secure_port(address, tls.server_credentials())
        )

    async def start(self) -> None:
        """Starts serving and reports it to health checks."""
        await self.server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Reports not serving, lets running calls finish within ``grace_s``, then closes."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _public_health(servicer: health.aio.HealthServicer, timeout_s: float) -> grpc.GenericRpcHandler:
    """Health checks whose message arrives in time."""

    async def check(messages: AsyncIterator[health_pb2.HealthCheckRequest], context: Any) -> Any:
        return await servicer.Check(await first_message(messages, timeout_s), context)

    handler = grpc.stream_unary_rpc_method_handler(
        check,
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": handler})
