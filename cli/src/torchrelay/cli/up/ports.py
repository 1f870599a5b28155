"""Ports of the children of one `up`: bound by it from the choice to the end of the run.

A bound socket that does not listen keeps its port from everybody who asks for any free one or connects from one. Ours,
NATS and Redis set SO_REUSEADDR, with which Linux lets them bind and listen beside it, also when they start again.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Sequence

from torchrelay.cli.errors import CliError
from torchrelay.common.host.addresses import family_of

PREFERRED_HTTP_PORT = 8080


class Ports:
    """Reserves ports until ``close``."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def close(self) -> None:
        """Gives all ports up; those whose server listens stay taken by it."""
        for held in self._held:
            held.close()
        self._held.clear()

    def free(self, host: str = "127.0.0.1", preferred: Sequence[int] = ()) -> int:
        """The first free port of ``preferred``, or any. Raises ``CliError`` for an address of another machine."""
        for port in preferred:
            if self._take(host, port):
                return port
        for _ in range(100):
            if chosen := self._take(host, 0):
                return chosen
        raise _foreign(host)

    def exactly(self, host: str, port: int, setting: str = "") -> int:
        """Reserves ``port``, which ``setting`` asks for. Raises ``CliError`` when it is taken."""
        if not self._take(host, port):
            if (error := _fault(host, port)) is not None:
                raise error
            where = f" in {setting}" if setting else ""
            raise CliError(f"port {port} on {host} is taken", f"choose another{where}, or 0 for any free one")
        return port

    def _take(self, host: str, port: int) -> int | None:
        try:
            held = _bound(host, port)
        except (OSError, UnicodeError):
            return None
        bound: int = held.getsockname()[1]
        if sys.platform != "linux":  # elsewhere no server could bind beside it: the port is only likely to stay free
            held.close()
            return bound
        if not self._claim(bound):
            held.close()
            return None
        self._held.append(held)
        return bound

    def _claim(self, port: int) -> bool:
        """Keeps other `up`s from the port, which SO_REUSEADDR would let them bind too.

        An abstract Unix socket name is per network namespace, like ports, and ends with the process.
        """
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0torchrelay-port-{port}")
        except OSError:
            claim.close()
            return False
        self._held.append(claim)
        return True


def _bound(host: str, port: int) -> socket.socket:
    """A socket that is bound as servers bind theirs; on ``::`` for IPv4 too.

    Raises ``OSError`` or ``UnicodeError``, also for what is no address of this machine or no address at all.
    """
    held = socket.socket(family_of(host))
    try:
        # Ignores lingering connections of a server that just ended.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if held.family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
        held.bind((host, port))
    except BaseException:
        held.close()
        raise
    return held


def _fault(host: str, port: int) -> CliError | None:
    """Why the port cannot be had, though it may be free; None: it is taken."""
    try:
        _bound(host, 0).close()
        _bound(host, port).close()
    except PermissionError:
        return CliError(f"this user may not listen on port {port}", "choose a port above 1023")
    except (OSError, UnicodeError) as error:
        is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        return None if is_taken else _foreign(host)
    return None


def _foreign(host: str) -> CliError:
    return CliError(f"this machine cannot listen on {host}", "pass one of its own addresses with --host")
