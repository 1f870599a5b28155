"""The shared-memory transport within a host: a Unix socket to connect to, then a ring in memory per direction.

connector                                          acceptor
connect to the socket at the path           ->
a socket for the other direction, two rings ->     on first use
counts of bytes in ring 0                   ->
                                            <-     counts of bytes in ring 1

Both processes must belong to the same user. Addresses are "shm:" and the path of the socket.
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
from torchrelay.transfer.transport import sockets
from torchrelay.transfer.transport.interface import TICK_S, Connection, Listener, TransferClass
from torchrelay.transfer.transport.shm_ring import RingReader, RingWriter, check_ring, make_ring
from torchrelay.transfer.transport.sockets import BACKLOG, SEND_TIMEOUT_S

SCHEME = "shm:"
_CONNECT_RETRY_S = 0.01
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
log = get_logger(__name__)


class ShmConnection:
    """See ``interface.Connection``. The accepted end receives its rings from the connector on first use; until it has
    received a byte, only one thread may use it.
    """

    def __init__(
        self, control: socket.socket, send_timeout_s: float, ends: tuple[RingWriter, RingReader] | None = None
    ) -> None:
        self._control, self._send_timeout_s = control, send_timeout_s
        self._ends = ends
        self._aborted = False
        if ends is None:
            sockets.set_timeouts(control, receive_s=TICK_S, send_s=send_timeout_s)

    @classmethod
    def opened(cls, control: socket.socket, send_timeout_s: float) -> ShmConnection:
        """Opens the connector's end."""
        with ExitStack() as closing:
            rings = [make_ring(), make_ring()]
            for ring in rings:
                closing.callback(os.close, ring)
            incoming, peer_end = socket.socketpair()
            closing.callback(incoming.close)
            with peer_end:
                socket.send_fds(control, [b"\0"], [peer_end.fileno(), *rings])
            ends = RingWriter(control, rings[0], send_timeout_s), RingReader(incoming, rings[1], send_timeout_s)
            closing.pop_all()
            return cls(control, send_timeout_s, ends)

    def receive_into(self, view: memoryview) -> int:
        ends = self._ends or self._accept_rings()
        return ends[1].receive_into(view) if ends else 0

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        deadline = time.monotonic() + self._send_timeout_s
        while self._ends is None:
            try:
                if not self._accept_rings():
                    raise BrokenPipeError("the peer is gone")
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
        self._ends[0].send(parts)

    def set_class(self, transfer_class: TransferClass) -> None:
        """Nothing to do: within a host there is no link to share."""

    def peer_closed(self) -> bool:
        if self._ends is not None:
            return self._ends[1].peer_closed()
        return sockets.peer_closed(self._control)

    def abort(self) -> None:
        self._aborted = True
        sockets.shut_down(self._control)
        for end in self._ends or ():
            end.shutdown()

    def close(self) -> None:
        self.abort()
        for end in self._ends or ():
            end.close()
        self._control.close()

    def _accept_rings(self) -> tuple[RingWriter, RingReader] | None:
        """Receives the rings from the connector; None if it is gone. Raises ``TimeoutError``."""
        try:
            message, received, _, _ = socket.recv_fds(self._control, 1, 3, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError as error:
            raise TimeoutError("nothing received") from error
        if not message:
            return None
        with ExitStack() as closing:
            for ring in received[1:]:
                closing.callback(os.close, ring)
            counts = [closing.enter_context(_socket_of(descriptor)) for descriptor in received[:1]]
            if len(received) != 3:
                raise ConnectionError("the peer sent no rings")
            for ring in received[1:]:
                check_ring(ring)
            outgoing = RingWriter(counts[0], received[2], self._send_timeout_s)
            self._ends = outgoing, RingReader(self._control, received[1], self._send_timeout_s)
            closing.pop_all()
        if self._aborted:  # before the ends were set
            self.abort()
        return self._ends


class ShmListener:
    """See ``interface.Listener``. Replaces the socket of a dead process, and removes its own when closed."""

    def __init__(self, path: Path, backlog: int, send_timeout_s: float) -> None:
        self.address = f"{SCHEME}{path}"
        self._path, self._send_timeout_s = path, send_timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_abandoned(path)
            self._socket.bind(str(path))
            self._inode = path.stat().st_ino
            path.chmod(0o600)
            self._socket.listen(backlog)
        except BaseException:
            self._socket.close()
            raise

    def accept(self) -> Connection | None:
        while (connected := sockets.accept(self._socket)) is not None:
            if peer_user(connected) == os.geteuid():
                return ShmConnection(connected, self._send_timeout_s)
            log.warning("foreign_user_refused", user=peer_user(connected))
            connected.close()
        return None

    def close(self) -> None:
        sockets.shut_down(self._socket)  # wakes a thread in accept
        self._socket.close()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


class ShmTransport:
    """See ``interface.Transport``; addresses are "shm:/path"."""

    def __init__(self, send_timeout_s: float = SEND_TIMEOUT_S, backlog: int = BACKLOG) -> None:
        self._send_timeout_s, self._backlog = send_timeout_s, backlog

    def listen(self, host: str, port: int = 0) -> Listener:
        """``host`` is the address; there are no ports."""
        return ShmListener(_path_of(host), self._backlog, self._send_timeout_s)

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(control, _path_of(address), time.monotonic() + timeout_s, stop or threading.Event())
            if peer_user(control) != os.geteuid():
                raise PermissionError(f"{address} belongs to another user")
            return ShmConnection.opened(control, self._send_timeout_s)
        except BaseException:
            control.close()
            raise


def peer_user(connected: socket.socket) -> int:
    """The user id of the process at the other end."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


def _socket_of(descriptor: int) -> socket.socket:
    """The socket of a descriptor, which it owns: a second close could hit another file with the same number."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        os.close(descriptor)
        raise ConnectionError(f"the peer sent no socket: {error}") from error


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
        raise ConnectionError(f"{address!r} is not a valid address of the form {SCHEME}/path")
    return path


def _remove_abandoned(path: Path) -> None:
    """Removes a socket that a dead process has left; a socket with a listener stays."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
