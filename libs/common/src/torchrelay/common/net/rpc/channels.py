"""gRPC channels that reconnect, carry a token, and use TLS by setting."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import Any, Self

import grpc

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.addresses import join_address, split_address
from torchrelay.common.identity.callers import CLUSTER_NAME, Caller, certificate_name
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.options import OPTIONS

TOKEN = "torchrelay-token"  # the metadata key of a caller's token
# Reconnect to a restarted service within a fraction of a second.
_CHANNEL_OPTIONS = [
    *OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),  # the least time that an attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_retries", 0),
]
_KEPT = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.SHUTDOWN)
_DNS = "dns:///"
SCHEDULER_SERVICE = "torchrelay.control.v1.Scheduler"  # the name in health checks; only the active scheduler serves it
_ACTIVE_ONLY = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": SCHEDULER_SERVICE},
}


def _tls_options(callee: Caller | None) -> list[tuple[str, Any]]:
    """Certificates name the cluster and their owner's part in it, not its address."""
    name = CLUSTER_NAME if callee is None else certificate_name(callee)
    return [*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)]


def _target(address: str) -> tuple[str, list[tuple[str, Any]]]:
    """The target and the options for ``address``: of several schedulers, those that are active by their health checks.

    gRPC asks each of them by a stream (gRFC A17).
    """
    if "," not in address and not address.startswith(_DNS):
        return address, []
    options = [("grpc.service_config", json.dumps(_ACTIVE_ONLY)), ("grpc.dns_min_time_between_resolutions_ms", 1000)]
    if address.startswith(_DNS):
        return address, options
    try:
        pairs = [split_address(each.strip()) for each in address.split(",")]
        versions = {ip_address(host).version for host, _ in pairs}
    except ValueError as error:
        raise InvalidRequest(
            f"{address!r} names several servers, and not each as IP:port ({error}); for names use dns:///NAME:PORT, "
            "which resolves to all of them",
            field="scheduler_address",
        ) from error
    if len(versions) > 1:
        raise InvalidRequest(f"{address!r} mixes IPv4 and IPv6", field="scheduler_address")
    return f"ipv{versions.pop()}:{','.join(join_address(*pair) for pair in pairs)}", options


def open_channel(
    address: str, tls: Tls | None = None, token: str = "", callee: Caller | None = None, *, is_thin: bool = False
) -> grpc.aio.Channel:
    """A lazy, reconnecting channel to ``host:port``, or to the active one of several schedulers: ``IP:port,IP:port`` or
    ``dns:///host:port``. Raises ``InvalidRequest`` for other lists.

    ``tls``: this process's identity; None: plain text. Every call carries ``token``, if there is one. ``callee``: the
    part that the server's certificate must name; None: any part of the cluster, for health checks.
    ``is_thin``: messages are small and rare, so the channel does not probe for bandwidth.
    """
    target, options = _target(address)
    if is_thin:
        options.append(("grpc.http2.bdp_probe", 0))
    if tls is not None:
        return _TlsChannel(target, tls, [*_tls_options(callee), *options])
    channel = grpc.aio.insecure_channel(target, options=[*_CHANNEL_OPTIONS, *options])
    return _TokenChannel(channel, token) if token else channel


def open_blocking_channel(
    address: str, tls: Tls | None = None, token: str = "", callee: Caller | None = None
) -> grpc.Channel:
    """``open_channel`` for programs without an event loop."""
    target, options = _target(address)
    if tls is not None:
        credentials = tls.identity.channel_credentials()
        return grpc.secure_channel(target, credentials, options=[*_tls_options(callee), *options])
    channel = grpc.insecure_channel(target, options=[*_CHANNEL_OPTIONS, *options])
    return with_token(channel, token) if token else channel


def with_token(channel: grpc.Channel, token: str) -> grpc.Channel:
    """The channel, every call on which carries ``token``."""
    return grpc.intercept_channel(channel, _TokenInterceptor(token))


class _WrappedChannel(grpc.aio.Channel):
    """Another channel, whose calls a subclass makes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __aenter__(self) -> Self:
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
        return self._method("unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._method("unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._method("stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._method("stream_stream", args, options)

    @abstractmethod
    def _method(self, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Returns the method of a stub. ``kind``: the channel's method that makes such methods, with its arguments."""


class _TokenChannel(_WrappedChannel):
    """Adds the token where a stub is made: asyncio's interceptors would cost CPU time per message of a stream."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        super().__init__(channel)
        self._metadata = ((TOKEN, token),)

    def _method(self, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return partial(getattr(self._channel, kind)(*args, **options), metadata=self._metadata)


class _TlsChannel(_WrappedChannel):
    """Connects with this process's certificate as it is then.

    gRPC reads a channel's certificate once. So where the certificate has been replaced, and the connection does not
    stand, the next call opens another channel. A connection that stands is kept: peers look at certificates only at its
    beginning, and calls keep their order.
    """

    def __init__(self, target: str, tls: Tls, options: list[tuple[str, Any]]) -> None:
        self._target, self._tls, self._options = target, tls, options
        self._identity = tls.identity
        super().__init__(self._opened())

    def _opened(self) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(self._target, self._identity.channel_credentials(), options=self._options)

    def _current(self) -> grpc.aio.Channel:
        identity = self._tls.identity
        if identity is not self._identity and self._channel.get_state() not in _KEPT:
            self._identity = identity
            self._channel = self._opened()  # gRPC closes the other once nothing refers to it: no call, no method
        return self._channel

    def _method(self, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        channel = self._channel
        method = getattr(channel, kind)(*args, **options)

        def call(*arguments: Any, **call_options: Any) -> Any:
            nonlocal channel, method
            if self._current() is not channel:
                channel = self._channel
                method = getattr(channel, kind)(*args, **options)
            return method(*arguments, **call_options)

        return call


class _CallDetails(grpc.ClientCallDetails):
    """The details of a call, with one more pair of metadata."""

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
        return continuation(_CallDetails(details, (TOKEN, self._token)), request)

    intercept_unary_unary = _call  # type: ignore[assignment]  # one method for all four kinds
    intercept_unary_stream = _call  # type: ignore[assignment]
    intercept_stream_unary = _call  # type: ignore[assignment]
    intercept_stream_stream = _call  # type: ignore[assignment]
