"""The seam between the relay and the wire: what a transport offers. TCP is the first of them."""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import Protocol

TICK_S = 0.1  # how long a receive blocks before it lets its caller look around


class TransferClass(enum.IntEnum):
    """What travels, and so what it yields to: each to those before it. The numbers go over the wire."""

    KV = 0  # KV pages and activations: a request waits for them
    URGENT = 1  # parameters of a model that somebody waits for
    IDLE = 2  # parameters nobody waits for: cache copies, repairs of the replicator


class Connection(Protocol):
    """A reliable, ordered stream of bytes between two nodes. One thread sends, the same or another receives; any may
    ``abort`` it. Closed when both are done with it.
    """

    def receive_into(self, view: memoryview) -> int:
        """Receives from one byte to the view's length; 0: the peer has ended.

        Raises ``TimeoutError`` after ``TICK_S`` without a byte, ``OSError`` when the connection broke.
        """
        ...

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends all parts, without joining them. Raises ``TimeoutError`` when the peer takes nothing for too long."""
        ...

    def set_class(self, transfer_class: TransferClass) -> None:
        """How what is sent from now on yields to others on the way. A new connection is of class ``KV``: it yields to
        none. Called by the thread that sends; harmless on a connection that broke.
        """
        ...

    def peer_closed(self) -> bool:
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

    def listen(self, host: str, port: int) -> Listener:
        """Port 0: a free one."""
        ...

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        """Raises ``OSError`` (``TimeoutError`` among them); ``InterruptedError`` when ``stop`` is set meanwhile."""
        ...
