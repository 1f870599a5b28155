"""Operations on the blocking sockets of a transport: time limits in the kernel, accept, shutdown."""

from __future__ import annotations

import errno
import socket
import struct
import time
from contextlib import suppress

from torchrelay.common.process.telemetry import get_logger

SEND_TIMEOUT_S = 30.0  # maximum time in which a peer accepts no byte
ACCEPT_RETRY_S = 0.1
BACKLOG = 128
_CLOSED = (errno.EBADF, errno.EINVAL)
log = get_logger(__name__)


def set_timeouts(blocking: socket.socket, receive_s: float, send_s: float) -> None:
    """Makes receives and sends raise ``BlockingIOError`` after these times, without a select call before each."""
    blocking.setblocking(True)
    blocking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_s))
    blocking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))


def accept(listening: socket.socket, retry_s: float = ACCEPT_RETRY_S) -> socket.socket | None:
    """The next connection; None once the socket is closed."""
    while True:
        try:
            return listening.accept()[0]
        except ConnectionAbortedError:  # the peer closed the connection before it was accepted
            continue
        except OSError as error:
            if error.errno in _CLOSED:
                return None
            # Out of descriptors or memory, which passes: the listener must survive it.
            log.warning("accept_failed", reason=str(error))
            time.sleep(retry_s)


def peer_closed(connected: socket.socket) -> bool:
    """Whether the peer, which must not be sending, is gone. Does not block."""
    try:
        return not connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def shut_down(ended: socket.socket) -> None:
    """Ends both directions and wakes the threads blocked in them."""
    with suppress(OSError):  # the peer may be gone; some systems refuse it on a listener
        ended.shutdown(socket.SHUT_RDWR)


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
