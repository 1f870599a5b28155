"""Resolves host names within a time limit.

The system's resolver may take half a minute when its servers are unreachable, and cannot be interrupted. So each lookup
has its own thread, shared by all callers that look up the name, and every caller waits until its own deadline at most.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

from torchrelay.transfer.transport.interface import TICK_S

SocketAddress = tuple[socket.AddressFamily, Any]  # the family, and the argument of ``socket.connect``


class Resolver:
    """A resolver that shares running lookups. Thread-safe."""

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, int], Future[SocketAddress]] = {}
        self._lock = threading.Lock()

    def resolve(self, host: str, port: int, deadline: float, stop: threading.Event | None = None) -> SocketAddress:
        """The first address of a name; a numeric address needs no lookup.

        Raises ``OSError`` for an unknown name, ``TimeoutError`` at ``deadline`` (monotonic), ``InterruptedError`` once
        ``stop`` is set.
        """
        try:
            return _look_up(host, port, socket.AI_NUMERICHOST)
        except (socket.gaierror, UnicodeError):
            lookup = self._start(host, port)
        while not wait([lookup], min(TICK_S, max(deadline - time.monotonic(), 0.0))).done:
            if stop is not None and stop.is_set():
                raise InterruptedError(f"stopped while looking up {host}")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the name {host!r} was not resolved in time")
        return lookup.result()

    def _start(self, host: str, port: int) -> Future[SocketAddress]:
        """The running lookup of the name, or a new one."""
        with self._lock:
            lookup = self._lookups.get((host, port))
            if lookup is None:
                lookup = Future()
                thread = threading.Thread(target=self._run, args=(host, port, lookup), name="resolve", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system is out of threads
                    raise OSError(str(error)) from error
                self._lookups[host, port] = lookup
            return lookup

    def _run(self, host: str, port: int, lookup: Future[SocketAddress]) -> None:
        try:
            lookup.set_result(_look_up(host, port))
        except (OSError, UnicodeError) as error:  # UnicodeError: a label is too long
            lookup.set_exception(OSError(f"the name {host!r} has no address: {error}"))
        finally:
            with self._lock:
                del self._lookups[host, port]


def _look_up(host: str, port: int, flags: int = 0) -> SocketAddress:
    family, _, _, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    return family, sockaddr
