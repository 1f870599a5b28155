"""Connections of a transport, and listeners, for the suites."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torchrelay.transfer.transport.interface import Connection, Listener, Transport
from torchrelay.transfer.transport.tcp import TcpTransport


@dataclass(frozen=True)
class TransportCase:
    """A transport, and the host to listen at."""

    transport: Transport = field(default_factory=TcpTransport)
    host: str = "127.0.0.1"

    @contextmanager
    def listening(self) -> Iterator[Listener]:
        listener = self.transport.listen(self.host, 0)
        try:
            yield listener
        finally:
            listener.close()

    @contextmanager
    def pair(self) -> Iterator[tuple[Connection, Connection]]:
        """Two ends of one connection: the connector's, and the accepted one."""
        with self.listening() as listener:
            near = self.transport.connect(listener.address, timeout_s=5.0)
            far = listener.accept()
            assert far is not None
            try:
                yield near, far
            finally:
                near.close()
                far.close()

    @contextmanager
    def silent_listener(self) -> Iterator[str]:
        """Accepts connections and never sends a byte; yields its address."""
        accepted: list[Connection] = []

        def accept() -> None:
            while (connection := listener.accept()) is not None:
                accepted.append(connection)

        with self.listening() as listener:
            accepting = threading.Thread(target=accept)
            accepting.start()
            yield listener.address
            listener.close()
            accepting.join()
            for connection in accepted:
                connection.close()


def receive(connection: Connection, num_bytes: int) -> bytes:
    """Exactly this many bytes, however they arrive."""
    view, done = memoryview(bytearray(num_bytes)), 0
    while done < num_bytes:
        try:
            received = connection.receive_into(view[done:])
        except TimeoutError:
            continue
        if received == 0:
            raise EOFError(f"{done} of {num_bytes} bytes came")
        done += received
    return bytes(view)
