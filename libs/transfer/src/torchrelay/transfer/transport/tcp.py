"""The TCP transport: blocking sockets, large buffers, no copies besides the kernel's."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torchrelay.common.host import addresses
from torchrelay.transfer.transport import sockets
from torchrelay.transfer.transport.interface import TICK_S, Connection, Listener, TransferClass
from torchrelay.transfer.transport.iovec import drop_prefix, nonempty_views
from torchrelay.transfer.transport.paced_sender import PacedSender, can_pace
from torchrelay.transfer.transport.resolver import Resolver
from torchrelay.transfer.transport.sockets import ACCEPT_RETRY_S, BACKLOG, SEND_TIMEOUT_S

KEEPALIVE_INTERVAL_S, NUM_KEEPALIVE_PROBES = 10, 3  # probes of an idle connection
_RESOLVER = Resolver()


class TcpConnection:
    """See ``interface.Connection``."""

    def __init__(self, connected: socket.socket, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._socket, self._send_timeout_s = connected, send_timeout_s
        self._sendmsg: Callable[[Sequence[memoryview]], int] = connected.sendmsg
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _enable_keepalive(connected, send_timeout_s)
        sockets.set_timeouts(connected, receive_s=TICK_S, send_s=send_timeout_s)

    def receive_into(self, view: memoryview) -> int:
        try:
            return self._socket.recv_into(view)
        except BlockingIOError as error:
            raise TimeoutError("nothing received") from error

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        pending = nonempty_views(parts)
        while pending:
            try:
                num_sent = self._sendmsg(pending)
            except BlockingIOError as error:
                raise TimeoutError(f"the peer accepted nothing for {self._send_timeout_s:g} s") from error
            drop_prefix(pending, num_sent)

    def set_class(self, transfer_class: TransferClass) -> None:
        if transfer_class == TransferClass.KV:
            self._sendmsg = self._socket.sendmsg
            return
        with suppress(OSError):  # a broken connection fails at its next use
            if can_pace(self._socket):
                self._sendmsg = PacedSender(self._socket, transfer_class).sendmsg

    def peer_closed(self) -> bool:
        return sockets.peer_closed(self._socket)

    def abort(self) -> None:
        sockets.shut_down(self._socket)

    def close(self) -> None:
        self.abort()
        self._socket.close()


class TcpListener:
    """See ``interface.Listener``."""

    def __init__(self, host: str, port: int, send_timeout_s: float, accept_retry_s: float) -> None:
        self._socket = addresses.listening_socket(host, port, BACKLOG)
        self.address = addresses.join_address(*self._socket.getsockname()[:2])
        self._send_timeout_s, self._accept_retry_s = send_timeout_s, accept_retry_s

    def accept(self) -> Connection | None:
        connected = sockets.accept(self._socket, self._accept_retry_s)
        return None if connected is None else TcpConnection(connected, self._send_timeout_s)

    def close(self) -> None:
        sockets.shut_down(self._socket)  # wakes a thread in accept
        self._socket.close()


class TcpTransport:
    """See ``interface.Transport``. ``accept_retry_s``: the pause after a failed accept."""

    def __init__(self, send_timeout_s: float = SEND_TIMEOUT_S, accept_retry_s: float = ACCEPT_RETRY_S) -> None:
        self._send_timeout_s, self._accept_retry_s = send_timeout_s, accept_retry_s

    def listen(self, host: str, port: int) -> Listener:
        return TcpListener(host, port, self._send_timeout_s, self._accept_retry_s)

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        deadline = time.monotonic() + timeout_s
        family, sockaddr = _RESOLVER.resolve(*split_address(address), deadline, stop)
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.setblocking(False)
            if connecting.connect_ex(sockaddr) != 0:
                _wait_connected(connecting, address, deadline, stop)
            return TcpConnection(connecting, self._send_timeout_s)
        except BaseException:
            connecting.close()
            raise


def _enable_keepalive(connected: socket.socket, send_timeout_s: float) -> None:
    """Enables detection of a peer whose machine or link died silently, even when nothing is sent."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_KEEPALIVE_PROBES)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_INTERVAL_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(send_timeout_s * 1000))


def _wait_connected(connecting: socket.socket, address: str, deadline: float, stop: threading.Event | None) -> None:
    poll = select.poll()
    poll.register(connecting, select.POLLOUT)
    while not poll.poll(TICK_S * 1000):
        if stop is not None and stop.is_set():
            raise InterruptedError(f"stopped while connecting to {address}")
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no connection to {address}")
    error = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, f"cannot connect to {address}: {os.strerror(error)}")


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[host]:port". Raises ``ConnectionError``, as for any unreachable peer."""
    try:
        return addresses.split_address(address)
    except ValueError as error:
        raise ConnectionError(str(error)) from error
