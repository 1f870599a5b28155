"""The seam between the relay and the wire: what a transport offers. TCP is the first of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

TICK_S = 0.1  # how long a receive blocks before it lets its caller look around


class Connection(Protocol):
    """A reliable, ordered stream of bytes between two nodes, used by one thread; any may ``abort`` it."""

    def receive_into(self, view: memoryview) -> int:
        """Receives from one byte to the view's length; 0: the peer has ended.

        Raises ``TimeoutError`` after ``TICK_S`` without a byte, ``OSError`` when the connection broke.
        """
        ...

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends all parts, without joining them. Raises ``TimeoutError`` when the peer takes nothing for too long."""
        ...

    def ended(self) -> bool:
        """Whether the peer, which is not to send anything now, has gone. Does not block."""
        ...

    def abort(self) -> None:
        """Ends both directions; wakes the thread that is blocked in them."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """A place where connections come in."""

    @property
    def address(self) -> str: ...

    def accept(self) -> Connection | None:
        """The next connection; None once the listener is closed."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """A way to move bytes."""

    def listen(self, host: str, port: int) -> Listener: ...

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        """Raises ``OSError`` (``TimeoutError`` among them); ``InterruptedError`` when ``stop`` is set meanwhile."""
        ...
