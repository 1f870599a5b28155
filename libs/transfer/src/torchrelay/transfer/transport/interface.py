"""The interface of a transport, between the data plane and the network."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from torchrelay.transfer.transport.transfer_class import TransferClass

__all__ = ["TICK_S", "Connection", "Listener", "TransferClass", "Transport"]

TICK_S = 0.1  # maximum time a receive blocks, so that its caller can check its time limits and its stop event


class Connection(Protocol):
    """A reliable, ordered byte stream between two nodes. One thread sends, the same or another receives; any thread may
    ``abort`` it. Close it when both threads are done.
    """

    def receive_into(self, view: memoryview) -> int:
        """Receives at least one byte, at most the view's length. 0: the peer has closed its end.

        Raises ``TimeoutError`` after ``TICK_S`` without a byte, ``OSError`` when the connection broke.
        """

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends all parts, without joining them. Raises ``TimeoutError`` when the peer accepts nothing for too long."""

    def set_class(self, transfer_class: TransferClass) -> None:
        """Sets what later sends yield to. A new connection has class ``KV``, which yields to nothing. Call it in the
        sending thread; on a broken connection it has no effect.
        """

    def peer_closed(self) -> bool:
        """Whether the peer, which must not be sending, is gone. Does not block."""

    def abort(self) -> None:
        """Ends both directions and wakes the threads blocked in them."""

    def close(self) -> None: ...


class Listener(Protocol):
    """Accepts connections at an address."""

    address: str

    def accept(self) -> Connection | None:
        """The next connection; None once the listener is closed."""

    def close(self) -> None: ...


class Transport(Protocol):
    """A way to listen and to connect."""

    def listen(self, host: str, port: int) -> Listener:
        """A listener at the address; port 0: any free port."""

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        """A new connection. Raises ``OSError``, such as ``TimeoutError``; ``InterruptedError`` once ``stop`` is set."""
