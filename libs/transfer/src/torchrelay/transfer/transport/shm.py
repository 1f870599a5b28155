"""The shared-memory transport, within a host: a Unix socket to meet at, then a ring in memory for each direction.

connector                                          acceptor
connect to the socket at the path           ->
the other direction's socket, two rings     ->     on first use
counts of bytes in ring 0                   ->
                                            <-     counts of bytes in ring 1

Only processes of the same user meet. Addresses are "shm:" and the path of the socket.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.transport.interface import TICK_S, Connection, Listener, TransferClass
from torchrelay.transfer.transport.shm_ring import RingReader, RingWriter, check_ring, make_ring
from torchrelay.transfer.transport.socket_timeouts import set_timeouts

SCHEME = "shm:"
SEND_TIMEOUT_S = 30.0  # a peer that takes no byte for so long is given up
ACCEPT_RETRY_S = 0.1
_CONNECT_RETRY_S = 0.01
_BACKLOG = 128
_CLOSED = (errno.EBADF, errno.EINVAL)
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
log = get_logger(__name__)


class ShmConnection:
    """See ``transport.Connection``. The accepted end gets its rings, which the connector sends, on its first use: until
    a byte was received, one thread uses it.
    """

    def __init__(self, control: socket.socket, ends: tuple[RingWriter, RingReader] | None = None) -> None:
        self._control = control
        self._ends = ends
        self._aborted = False
        if ends is None:
            set_timeouts(control, receive_s=TICK_S, send_s=SEND_TIMEOUT_S)

    @classmethod
    def opened(cls, control: socket.socket) -> ShmConnection:
        """The connector's end."""
        with ExitStack() as closing:
            rings = [make_ring(), make_ring()]
            for ring in rings:
                closing.callback(os.close, ring)
            back, theirs = socket.socketpair()
            closing.callback(back.close)
            with theirs:
                socket.send_fds(control, [b"\0"], [theirs.fileno(), *rings])
            ends = RingWriter(control, rings[0], SEND_TIMEOUT_S), RingReader(back, rings[1], SEND_TIMEOUT_S)
            closing.pop_all()
            return cls(control, ends)

    def receive_into(self, view: memoryview) -> int:
        ends = self._ends or self._accept_rings()
        return ends[1].receive_into(view) if ends else 0

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while self._ends is None:
            try:
                if not self._accept_rings():
                    raise BrokenPipeError("the peer has gone")
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
        self._ends[0].send(parts)

    def set_class(self, transfer_class: TransferClass) -> None:
        """There is no link to share within a host."""

    def peer_closed(self) -> bool:
        if self._ends is not None:
            return self._ends[1].peer_closed()
        try:
            return not self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    def abort(self) -> None:
        self._aborted = True
        with suppress(OSError):  # the peer may have gone first
            self._control.shutdown(socket.SHUT_RDWR)
        if self._ends is not None:
            for end in self._ends:
                end.shutdown()

    def close(self) -> None:
        self.abort()
        for end in self._ends or ():
            end.close()
        self._control.close()

    def _accept_rings(self) -> tuple[RingWriter, RingReader] | None:
        """Takes what the connector sends first; None when it went without. Raises ``TimeoutError``."""
        try:
            said, received, _, _ = socket.recv_fds(self._control, 1, 3, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError as error:
            raise TimeoutError("nothing received") from error
        if not said:
            return None
        with ExitStack() as closing:
            for ring in received[1:]:
                closing.callback(os.close, ring)
            counts = [closing.enter_context(_socket_of(descriptor)) for descriptor in received[:1]]
            if len(received) != 3:
                raise ConnectionError("the peer sends no rings")
            for ring in received[1:]:
                check_ring(ring)
            outgoing = RingWriter(counts[0], received[2], SEND_TIMEOUT_S)
            self._ends = outgoing, RingReader(self._control, received[1], SEND_TIMEOUT_S)
            closing.pop_all()
        if self._aborted:  # meanwhile
            self.abort()
        return self._ends


class ShmListener:
    """See ``transport.Listener``. The socket at the path goes when it is closed; a dead process's is replaced."""

    def __init__(self, path: Path) -> None:
        self.address = f"{SCHEME}{path}"
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_abandoned(path)
            self._socket.bind(str(path))
            self._inode = path.stat().st_ino
            path.chmod(0o600)
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise

    def accept(self) -> Connection | None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _CLOSED:
                    return None
                log.warning("accept_failed", reason=str(error))  # no descriptor or no memory is left: that passes
                time.sleep(ACCEPT_RETRY_S)
                continue
            if peer_user(connected) == os.geteuid():
                return ShmConnection(connected)
            log.warning("foreign_user_refused", user=peer_user(connected))
            connected.close()

    def close(self) -> None:
        with suppress(OSError):  # wakes a thread in accept
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


class ShmTransport:
    """See ``transport.Transport``; addresses are "shm:/path"."""

    def listen(self, host: str, port: int = 0) -> Listener:
        """``host`` is the address; there are no ports."""
        return ShmListener(_path_of(host))

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(control, _path_of(address), time.monotonic() + timeout_s, stop or threading.Event())
            if peer_user(control) != os.geteuid():
                raise PermissionError(f"another user listens at {address}")
            return ShmConnection.opened(control)
        except BaseException:
            control.close()
            raise


def peer_user(connected: socket.socket) -> int:
    """The user whose process made the other end."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


def _socket_of(descriptor: int) -> socket.socket:
    """Owns the descriptor: nobody else is to close it, for its number may be another's by then."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        os.close(descriptor)
        raise ConnectionError(f"the peer sends no socket: {error}") from error


def _connect(control: socket.socket, path: Path, deadline: float, stop: threading.Event) -> None:
    control.setblocking(False)
    while (error := control.connect_ex(str(path))) == errno.EAGAIN:  # the listener's queue is full
        if stop.wait(_CONNECT_RETRY_S):
            raise InterruptedError(f"stopped while connecting to {path}")
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no connection to {path}")
    if error:
        raise OSError(error, f"cannot connect to {path}: {os.strerror(error)}")


def _path_of(address: str) -> Path:
    path = Path(address.removeprefix(SCHEME))
    if not address.startswith(SCHEME) or not path.is_absolute():
        raise ConnectionError(f"{address!r} is not an address of the form {SCHEME}/path")
    return path


def _remove_abandoned(path: Path) -> None:
    """Removes the socket that a process left behind when it died; one that somebody listens on stays."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        if asking.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
