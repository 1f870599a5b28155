"""gRPC set-up of all services: servers with health checks and error mapping, channels with keep-alive, TLS by setting.

A ``TorchrelayError`` raised by a servicer becomes its gRPC status, with its code, field and retry time in the trailing
metadata; ``error_from_rpc`` restores it on the client. A server with a ``CallCheck`` serves each method to those alone
who may call it; health checks are open to all.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from torchrelay.common.callers import CLUSTER_NAME, CallCheck, MethodCallers
from torchrelay.common.errors import (
    Conflict,
    Overloaded,
    TorchrelayError,
    Unavailable,
    error_class,
)
from torchrelay.common.tls import Tls

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
_TOKEN = "torchrelay-token"
_HEALTH = "/grpc.health.v1.Health/"
_CODE, _FIELD, _RETRY = "torchrelay-code", "torchrelay-field", "torchrelay-retry-after-s"
_FAULT = "torchrelay-fault"
Faults = Callable[[], Awaitable[str]]
_BINARY_FIELD = "torchrelay-field-bin"  # of a field that is not ASCII; gRPC carries binary metadata under such names
# Metadata above 8 KiB ends a call without its cause. Both are cut where a tenant's names make them longer.
_MAX_FIELD_BYTES, _MAX_MESSAGE_CHARS = 1024, 1024
_METADATA_BYTES, _LOOKAHEAD_BYTES = 8 << 10, 64 << 10


@dataclass(frozen=True, slots=True)
class PublicLimits:
    """Of a server that strangers reach. ``connections`` counts established ones and those that are being made."""

    connections: int
    streams: int  # calls at once on one connection; a client lets further ones wait
    message_bytes: int
    head_s: float  # for a connection's first frames
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


def open_channel(address: str, tls: Tls | None = None, token: str = "") -> grpc.aio.Channel:
    """A lazy, reconnecting channel to ``host:port``.

    ``tls``: this process's identity; None: plain text. Every call carries ``token``, if there is one.
    """
    if tls is not None:
        return grpc.aio.secure_channel(address, tls.channel_credentials(), options=_TLS_OPTIONS)
    channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return _TokenChannel(channel, token) if token else channel


def open_blocking_channel(address: str, tls: Tls | None = None, token: str = "") -> grpc.Channel:
    """``open_channel`` for programs without an event loop."""
    if tls is not None:
        return grpc.secure_channel(address, tls.channel_credentials(), options=_TLS_OPTIONS)
    channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return with_token(channel, token) if token else channel


def with_token(channel: grpc.Channel, token: str) -> grpc.Channel:
    """The channel, every call on which carries ``token``."""
    return grpc.intercept_channel(channel, _TokenInterceptor(token))


class _TokenChannel(grpc.aio.Channel):
    """Adds the token where a stub is made: asyncio's interceptors would cost CPU time per message of a stream."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = ((_TOKEN, token),)

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        return await self._channel.__aexit__(*exc_info)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return partial(self._channel.unary_unary(*args, **options), metadata=self._metadata)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return partial(self._channel.unary_stream(*args, **options), metadata=self._metadata)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return partial(self._channel.stream_unary(*args, **options), metadata=self._metadata)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return partial(self._channel.stream_stream(*args, **options), metadata=self._metadata)


class _CallDetails(grpc.ClientCallDetails):
    """Those of a call, with one more pair of metadata."""

    def __init__(self, details: Any, pair: tuple[str, str]) -> None:
        self.method, self.timeout, self.credentials = details.method, details.timeout, details.credentials
        self.wait_for_ready, self.compression = details.wait_for_ready, details.compression
        self.metadata = (*(details.metadata or ()), pair)


class _TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, token: str) -> None:
        self._token = token

    def _call(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(_CallDetails(details, (_TOKEN, self._token)), request)

    intercept_unary_unary = _call  # type: ignore[assignment]  # one method for all four kinds
    intercept_unary_stream = _call  # type: ignore[assignment]
    intercept_stream_unary = _call  # type: ignore[assignment]
    intercept_stream_stream = _call  # type: ignore[assignment]


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


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="ignore") if isinstance(value, bytes) else value


class _CallWrapper(grpc.aio.ServerInterceptor):
    """Checks the caller, and turns a ``TorchrelayError`` raised by any servicer into its status and metadata."""

    def __init__(self, call_check: CallCheck | None) -> None:
        self._call_check = call_check

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
        check = None
        if self._call_check is not None and not method.startswith(_HEALTH):
            check = partial(_check_caller, self._call_check, method)
        mapped = (_mapped_stream if handler.response_streaming else _mapped)(getattr(handler, kind), check)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(mapped, handler.request_deserializer, handler.response_serializer)


def _check_caller(call_check: CallCheck, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    token = next((value for key, value in context.invocation_metadata() or () if key == _TOKEN), "")
    names = context.auth_context().get("x509_subject_alternative_name", ())
    call_check.check(method, _text(token) or "", [name.decode(errors="replace") for name in names])


_Check: TypeAlias = Callable[[grpc.aio.ServicerContext[Any, Any]], None]


def _mapped(call: Callable[..., Awaitable[Any]], check: _Check | None) -> Callable[..., Awaitable[Any]]:
    async def mapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if check is not None:
                check(context)
            return await call(request, context)
        except TorchrelayError as error:
            status = _status_of(error)
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


def fault_in(trailing: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Why a health check was answered with NOT_SERVING; empty if the server does not say."""
    return next((str(value) for key, value in trailing or () if key == _FAULT), "")


class _HealthServicer(health.aio.HealthServicer):
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


async def _no_fault() -> str:
    return ""


class RpcServer:
    """A gRPC server with health checks. With ``tls`` it serves only peers of the same cluster.

    ``node_key``: of a node that checks who calls; None: it serves everybody, as the tenants' API does. ``limits``:
    strangers reach it; then a health check must be asked each time, as watching needs no key and never ends.
    ``fault`` is asked at each health check: why the service cannot serve, empty if it can.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        tls: Tls | None = None,
        node_key: bytes | None = None,
        limits: PublicLimits | None = None,
        fault: Faults = _no_fault,
    ) -> None:
        self._call_check = None if node_key is None else CallCheck(node_key, is_tls=tls is not None)
        options = _OPTIONS if limits is None else [*_OPTIONS, *limits.options]
        self.server = grpc.aio.server(interceptors=(_CallWrapper(self._call_check),), options=options)
        self._health = _HealthServicer(fault)
        if limits is None:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        else:
            self.server.add_generic_rpc_handlers((_public_health(self._health),))
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

    def allow(self, methods: MethodCallers) -> None:
        """Lets these callers call these methods; without it, a node that checks serves nobody."""
        if self._call_check is not None:
            self._call_check.allow(methods)

    async def start(self) -> None:
        """Starts serving and reports it to health checks."""
        await self.server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Reports not serving, lets running calls finish within ``grace_s``, then closes."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _public_health(servicer: health.aio.HealthServicer) -> grpc.GenericRpcHandler:
    """Health checks of the one service here, whatever the message names: nobody waits for a stranger's message."""

    async def check(_messages: AsyncIterator[bytes], context: Any) -> Any:
        return await servicer.Check(health_pb2.HealthCheckRequest(), context)

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(
        check, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": handler})
