"""The TCP transport: plain blocking sockets, large buffers, no copy but the kernel's own."""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.transport.interface import TICK_S, Connection, Listener, TransferClass
from torchrelay.transfer.transport.iovec import drop_prefix, nonempty_views
from torchrelay.transfer.transport.paced_sender import PacedSender, can_pace
from torchrelay.transfer.transport.resolver import Resolver
from torchrelay.transfer.transport.socket_timeouts import set_timeouts

SEND_TIMEOUT_S = 30.0  # a peer that takes no byte for so long is given up
ACCEPT_RETRY_S = 0.1
KEEPALIVE_INTERVAL_S, NUM_KEEPALIVE_PROBES = 10, 3  # of a peer that is silent while nothing is sent to it
_BACKLOG = 128
_CLOSED = (errno.EBADF, errno.EINVAL)
_RESOLVER = Resolver()
log = get_logger(__name__)


class TcpConnection:
    """See ``transport.Connection``."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sendmsg: Callable[[Sequence[memoryview]], int] = connected.sendmsg
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _enable_keepalive(connected)
        set_timeouts(connected, receive_s=TICK_S, send_s=SEND_TIMEOUT_S)

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
                raise TimeoutError(f"the peer has taken nothing for {SEND_TIMEOUT_S:g} s") from error
            drop_prefix(pending, num_sent)

    def set_class(self, transfer_class: TransferClass) -> None:
        if transfer_class == TransferClass.KV:
            self._sendmsg = self._socket.sendmsg
            return
        with suppress(OSError):  # a connection that broke says so when it is used
            if can_pace(self._socket):
                self._sendmsg = PacedSender(self._socket, transfer_class).sendmsg

    def peer_closed(self) -> bool:
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    def abort(self) -> None:
        with suppress(OSError):  # the peer may have gone first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._socket.close()


class TcpListener:
    """See ``transport.Listener``."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.address = join_address(*self._socket.getsockname()[:2])

    def accept(self) -> Connection | None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except ConnectionAbortedError:  # it came and went
                continue
            except OSError as error:
                if error.errno in _CLOSED:
                    return None
                # No descriptor or no memory is left: that passes, while a door that closes for it would stay closed.
                log.warning("accept_failed", reason=str(error))
                time.sleep(ACCEPT_RETRY_S)
                continue
            return TcpConnection(connected)

    def close(self) -> None:
        with suppress(OSError):  # wakes a thread in accept; not every system calls this a connection
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class TcpTransport:
    """See ``transport.Transport``."""

    def listen(self, host: str, port: int) -> Listener:
        return TcpListener(host, port)

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        deadline = time.monotonic() + timeout_s
        family, sockaddr = _RESOLVER.resolve(*split_address(address), deadline, stop)
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.setblocking(False)
            if connecting.connect_ex(sockaddr) != 0:
                _wait_connected(connecting, address, deadline, stop)
            return TcpConnection(connecting)
        except BaseException:
            connecting.close()
            raise


def _enable_keepalive(connected: socket.socket) -> None:
    """A peer whose machine or link died without a word is found out, also by a stream that has nothing to send."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_KEEPALIVE_PROBES)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_INTERVAL_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT_S * 1000))


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
    """ "host:port" or "[host]:port". Raises ``ConnectionError`` for anything else: such a peer cannot be reached."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ConnectionError(f"{address!r} is not an address of the form host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
