"""The interface between the data plane and the network: what a transport offers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from torchrelay.transfer.transport.transfer_class import TransferClass

__all__ = ["TICK_S", "Connection", "Listener", "TransferClass", "Transport"]

TICK_S = 0.1  # how long a receive blocks before its caller gets to check its time limits and its stop event


class Connection(Protocol):
    """A reliable, ordered byte stream between two nodes. One thread sends, the same or another receives; any may
    ``abort`` it. Closed when both are done with it.
    """

    def receive_into(self, view: memoryview) -> int:
        """Receives at least one byte, at most the view's length; 0: the peer has closed its end.

        Raises ``TimeoutError`` after ``TICK_S`` without a byte, ``OSError`` when the connection broke.
        """

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends all parts, without joining them. Raises ``TimeoutError`` when the peer accepts nothing for too long."""

    def set_class(self, transfer_class: TransferClass) -> None:
        """What later sends yield to. A new connection has class ``KV``, which yields to nothing. Called by the sending
        thread; harmless on a broken connection.
        """

    def peer_closed(self) -> bool:
        """Whether the peer, which must not be sending now, is gone. Does not block."""

    def abort(self) -> None:
        """Ends both directions and wakes the threads blocked in them."""

    def close(self) -> None: ...


class Listener(Protocol):
    """Accepts connections at one address."""

    address: str

    def accept(self) -> Connection | None:
        """The next connection; None once the listener is closed."""

    def close(self) -> None: ...


class Transport(Protocol):
    """Listens and connects."""

    def listen(self, host: str, port: int) -> Listener:
        """Port 0: any free port."""

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        """Raises ``OSError``, including ``TimeoutError``, and ``InterruptedError`` when ``stop`` is set meanwhile."""
